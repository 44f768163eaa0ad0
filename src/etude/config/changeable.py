"""Settings that say how a run is carried out and not what it makes: a run that goes on may have others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from etude.config.document import KeyPath
from etude.config.slots import LISTS, Slot


@dataclass(frozen=True, slots=True)
class Changeable:
    """Marks the field of a config class: `timeout: Annotated[float, CHANGEABLE] = Field(...)`."""


CHANGEABLE = Changeable()
"""On a key that `etude resume -o` may set: limits, patience, concurrency, memory; never what is trained."""


def is_changeable(slot: Slot | FieldInfo) -> bool:
    """Whether a run that goes on may have another value here."""
    return CHANGEABLE in slot.metadata


def slot_in(config: BaseModel, path: KeyPath) -> Slot | None:
    """The slot that a path leads to, by the classes that the config has in place; None without one."""
    node: Any = config
    slot: Slot | None = Slot(type(config))
    for key in path:
        if isinstance(node, BaseModel):
            # A component's own class, where the slot only knows its base.
            slot = next(Slot(type(node)).below(key), None)
            node = getattr(node, Slot(type(node)).fields().get(str(key), ""), None)
        else:
            slot = None if slot is None else next(slot.below(key), None)
            node = node.get(key) if isinstance(node, Mapping) else None
    return slot


def changeable_keys(config: BaseModel) -> list[str]:
    """All keys of a config that a run that goes on may have changed, as one types them."""
    return [".".join(path) for path, field in _fields(config) if is_changeable(field)]


def _fields(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    if isinstance(node, BaseModel):
        for key, name in Slot(type(node)).fields().items():
            yield (*path, key), type(node).model_fields[name]
            yield from _fields(getattr(node, name), (*path, key))
    elif isinstance(node, Mapping):
        for key, value in node.items():
            yield from _fields(value, (*path, str(key)))
    elif isinstance(node, LISTS):
        for number, value in enumerate(node):
            yield from _fields(value, (*path, str(number)))
