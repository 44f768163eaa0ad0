"""What a config key takes and what was found, in words. Used by errors and by the reference page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr

from etude.config.slots import LISTS, Slot

_WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "text",
    SecretStr: "text",
    Path: "a path",
    Any: "any value",
}
_PLURALS: dict[Any, str] = {str: "texts", int: "integers", float: "numbers", Path: "paths", Any: "values"}
_LONGEST = 60


def describe(slot: Slot) -> str:
    """`an integer >= 1`, `a list of texts`, `one of 'a', 'b'`."""
    arms = slot.arms()
    words = " or ".join(dict.fromkeys(_word(arm) for arm in arms))
    bounds = dict.fromkeys(_bound(item) for arm in arms for item in arm.metadata)
    bounds.pop("", None)
    return f"{words} {' and '.join(bounds)}" if bounds else words


def shown(value: Any) -> str:
    """What was found in place of what was expected; short, and without what is inside."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, LISTS):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _word(arm: Slot) -> str:
    annotation = arm.annotation
    if annotation in _WORDS:
        return _WORDS[annotation]
    if get_origin(annotation) is Literal:
        return _one_of(get_args(annotation))
    if arm.holds(Enum):
        return _one_of(member.value for member in annotation)
    if arm.holds(*LISTS):
        items = [
            item for argument in get_args(annotation) if argument is not ... for item in Slot(argument).arms()
        ]
        return f"a list of {_PLURALS.get(items[0].annotation, describe(items[0]))}" if items else "a list"
    if arm.holds(Mapping, BaseModel):
        keys = ", ".join(arm.fields())
        return f"a mapping with the keys {keys}" if keys else "a mapping"
    return getattr(annotation, "__name__", str(annotation))


def _one_of(values: Iterable[Any]) -> str:
    listed = [repr(value) for value in values]
    return listed[0] if len(listed) == 1 else f"one of {', '.join(listed)}"


def _bound(item: Any) -> str:
    match item:
        case annotated_types.Ge():
            return f">= {item.ge}"
        case annotated_types.Gt():
            return f"> {item.gt}"
        case annotated_types.Le():
            return f"<= {item.le}"
        case annotated_types.Lt():
            return f"< {item.lt}"
        case annotated_types.MinLen():
            return f"of length >= {item.min_length}"
        case annotated_types.MaxLen():
            return f"of length <= {item.max_length}"
        case _:
            pattern = getattr(item, "pattern", None)
            return f"matching {pattern!r}" if pattern else ""
