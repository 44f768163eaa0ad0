"""Numbers of every kind that Python code makes: as a float, and as JSON that every reader takes."""

from __future__ import annotations

import math
import numbers
from decimal import Decimal
from typing import Any


def number(value: Any) -> float:
    """A bool, any real number, a Decimal, or an array or tensor without dimensions, as a float.

    Raises ValueError, naming what came, for everything else, text that looks like a number included,
    and for what is too large for a float.
    """
    if not isinstance(value, numbers.Real | Decimal):
        if getattr(value, "ndim", None) != 0 or not callable(getattr(value, "item", None)):
            raise ValueError(f"a number is expected, found {kind_of(value)}")
        inner = value.item()
        if not isinstance(inner, numbers.Real | Decimal):
            raise ValueError(f"a number is expected, found {kind_of(value)} of {kind_of(inner)}")
        value = inner
    try:
        return float(value)
    except (OverflowError, ValueError) as error:
        raise ValueError(f"a number is expected, found {value!r:.40}: {error}") from None


def kind_of(value: Any) -> str:
    """`None`, or the type with its article, and the shape of an array: `an ndarray of shape (2,)`."""
    if value is None:
        return "None"
    name = type(value).__qualname__
    article = "an" if name[0].lower() in "aeiou" or name == "ndarray" else "a"
    shape = getattr(value, "shape", None)
    return f"{article} {name}" + (f" of shape {tuple(shape)}" if isinstance(shape, tuple) and shape else "")


def finite(value: Any) -> Any:
    """The value as JSON that every reader takes: numbers that are not finite become None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((finite(item) for item in value), key=str)
    return value
