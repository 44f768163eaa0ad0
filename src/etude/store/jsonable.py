"""Values as JSON: exactly (`plain`), or as close as possible, for people (`jsonable`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json, to_json

from etude.core.data_model import finite

_SCALARS = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:
    """Return `value` as JSON gives it back: a copy made of dicts with text keys, lists and scalars.

    Also takes pydantic models, dataclasses, and arrays and tensors without dimensions. Raises TypeError
    naming a type that JSON cannot keep.
    """
    if type(value) in _SCALARS:
        return value
    if type(value) is dict or isinstance(value, Mapping):  # The second check alone takes ten times as long.
        copy = {key if type(key) is str else _key(key): plain(inner) for key, inner in value.items()}
        if len(copy) != len(value):
            raise TypeError("a dict with two keys of the same text, such as 1 and '1', is not JSON")
        return copy
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    for scalar in (bool, int, float, str):
        if isinstance(value, scalar):
            return scalar(value)  # An instance of a subclass, such as an enum: JSON keeps its plain value.
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        inner = value.item()
        if type(inner) is not type(value):  # `item()` of numpy.longdouble returns its own type.
            return plain(inner)
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} is not JSON")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return str(key)
    if key is None or isinstance(key, int | float):
        return json.dumps(key)
    raise TypeError(f"a dict key of type {type(key).__qualname__} is not JSON")


def jsonable(value: Any) -> Any:
    """Return any value as JSON. Values without JSON become text, so a resumed run sees the same values."""
    if value is None or isinstance(value, str):
        return value
    try:
        return from_json(to_json(value, fallback=_plain_or_text, inf_nan_mode="strings"))
    except ValueError:
        # Bytes that are not text, or a structure that contains itself.
        return str(value)


def json_facts(facts: Mapping[Any, Any]) -> dict[str, Any]:
    """Return facts by name, each as `jsonable` returns it. Numbers that are not finite become None."""
    return {str(name): jsonable(finite(value)) for name, value in facts.items()}


def _plain_or_text(value: Any) -> Any:
    """Return numbers and arrays of other libraries as plain values, and anything else as text."""
    try:
        return plain(value)
    except TypeError:
        return str(value)
