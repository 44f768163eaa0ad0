"""What a config key takes, in words: `an integer >= 1`. Used by errors and by the reference page."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from etude.config.document import KeyPath

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
_LISTS = (list, tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class Slot:
    """The type of a key and its bounds."""

    annotation: Any
    metadata: tuple[Any, ...] = ()


def slot_at(model: type[BaseModel], path: KeyPath) -> Slot | None:
    """The slot that a path leads to, or None when there is no such key."""
    slot: Slot | None = Slot(model)
    for key in path:
        slot = next(iter(_below(slot.annotation, key)), None) if slot else None
    return slot


def keys_of(slot: Slot | None) -> list[str]:
    """The keys that a mapping in this slot may have; none when it is free."""
    return [key for arm in _arms(slot.annotation if slot else None) for key in _fields(arm)]


def describe(slot: Slot) -> str:
    """`an integer >= 1`, `a list of text`, `one of 'a', 'b'`."""
    words = " or ".join(dict.fromkeys(_word(arm) for arm in _arms(slot.annotation)))
    bounds = [text for item in slot.metadata if (text := _bound(item))]
    return f"{words} {' and '.join(bounds)}" if bounds else words


def unknown_keys(annotation: Any, data: Any, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Keys that pydantic would drop without a word, as it does in models that do not say `extra`."""
    if isinstance(data, dict | list):
        silent = [arm for arm in _arms(annotation) if _is(arm, BaseModel) and "extra" not in arm.model_config]
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            slot = next(iter(_below(annotation, key)), None)
            if slot is not None:
                yield from unknown_keys(slot.annotation, value, (*path, key))
            elif silent == _arms(annotation):
                yield (*path, key)


def shown(value: Any) -> str:
    """What was found in place of what was expected; short, and without what is inside."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, _LISTS):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def takes_path(annotation: Any) -> bool:
    """Whether a key of this type may be a `Path`."""
    return any(_is(arm, Path) for arm in _arms(annotation))


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models that a key of this type may hold."""
    return [arm for arm in _arms(annotation) if _is(arm, BaseModel)]


def _below(annotation: Any, key: str | int) -> Iterable[Slot]:
    for arm in _arms(annotation):
        arguments = get_args(arm)
        if isinstance(key, str) and key in _fields(arm):
            field = arm.model_fields[_fields(arm)[key]]
            yield Slot(field.annotation, tuple(field.metadata))
        elif _is(arm, Mapping) and len(arguments) == 2:
            yield _unwrap(Slot(arguments[1]))
        elif _is(arm, *_LISTS) and arguments and isinstance(key, int):
            yield _unwrap(Slot(arguments[0]))


def _fields(annotation: Any) -> dict[str, str]:
    """Names in the file to names in the class, of a model."""
    if not _is(annotation, BaseModel):
        return {}
    fields = annotation.model_fields
    return {field.alias: name for name, field in fields.items() if field.alias} | {
        name: name for name in fields
    }


def _arms(annotation: Any) -> list[Any]:
    """The members of a union but None; the annotation itself when it is no union."""
    annotation = _unwrap(Slot(annotation)).annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return [deep for arm in get_args(annotation) if arm is not type(None) for deep in _arms(arm)]
    return [annotation]


def _unwrap(slot: Slot) -> Slot:
    if get_origin(slot.annotation) is not Annotated:
        return slot
    annotation, *marks = get_args(slot.annotation)
    metadata = [item for mark in marks for item in (mark.metadata if isinstance(mark, FieldInfo) else [mark])]
    return replace(slot, annotation=annotation, metadata=(*slot.metadata, *metadata))


def _is(annotation: Any, *classes: type) -> bool:
    origin = get_origin(annotation) or annotation
    return isinstance(origin, type) and issubclass(origin, classes)


def _word(annotation: Any) -> str:
    if annotation in _WORDS:
        return _WORDS[annotation]
    if get_origin(annotation) is Literal:
        return _one_of(get_args(annotation))
    if _is(annotation, Enum):
        return _one_of([member.value for member in annotation])
    if _is(annotation, *_LISTS):
        items = [argument for argument in get_args(annotation) if argument is not ...]
        return f"a list of {_PLURALS.get(items[0], describe(Slot(items[0])))}" if items else "a list"
    if _is(annotation, Mapping, BaseModel):
        keys = ", ".join(_fields(annotation))
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
