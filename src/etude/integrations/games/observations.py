"""From an observation to the text that the model is shown."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

_MOST_NUMBERS = 256
"""Longer arrays are pictures or the like, which text does not show."""


def text_of_observation(value: Any) -> str:
    """Text as it is, numbers and arrays of them in a row, mappings as lines.

    Raises ValueError for what has no such text.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {text_of_observation(inner)}" for key, inner in value.items())
    return _row(value)


def _row(value: Any) -> str:
    size = getattr(value, "size", None)
    if isinstance(size, int) and hasattr(value, "tolist"):
        if size > _MOST_NUMBERS:
            raise ValueError(f"an array of {size} numbers, shape {getattr(value, 'shape', None)}")
        return _row(value.tolist())
    if isinstance(value, list | tuple):
        if any(isinstance(inner, list | tuple) for inner in value):
            return "\n".join(_row(inner) for inner in value)
        return " ".join(_row(inner) for inner in value)
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, numbers.Real):
        exact = float(value)
        return str(int(exact)) if math.isfinite(exact) and exact == int(exact) else f"{exact:.4g}"
    raise ValueError(f"an object of the type {type(value).__qualname__}")
