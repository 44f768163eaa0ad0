"""The types of config keys, with their nesting.

`Problems` collects all errors of a config and reports them together.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from etude.config.component import CHANGEABLE
from etude.config.document import Document, KeyPath, holds, join_path, value_at
from etude.core.errors import ConfigError, alternatives
from etude.core.secrets import is_secret_name

LISTS = (list, tuple, set, frozenset)


@dataclass(frozen=True, slots=True)
class KeyType:
    """The type of a key, with its bounds, references and default."""

    annotation: Any
    metadata: tuple[Any, ...] = ()
    default: Any = None

    @classmethod
    def from_field(cls, field: FieldInfo) -> KeyType:
        """Return the slot of a model's field."""
        return cls(field.annotation, tuple(field.metadata), field.default)

    def arms(self) -> list[KeyType]:
        """Return the members of a union except None, or the slot itself. `Annotated` is unwrapped."""
        if get_origin(self.annotation) is Annotated:
            annotation, *marks = get_args(self.annotation)
            inner = [
                item for mark in marks for item in (mark.metadata if isinstance(mark, FieldInfo) else [mark])
            ]
            return KeyType(annotation, (*self.metadata, *inner)).arms()
        if get_origin(self.annotation) in (Union, types.UnionType):
            members = (KeyType(member, self.metadata) for member in get_args(self.annotation))
            return [arm for member in members if member.annotation is not type(None) for arm in member.arms()]
        return [self]

    def inner_slots(self, key: str | int) -> Iterator[KeyType]:
        """Yield the slots that a key of a mapping, or a position in a list, may have."""
        for arm in self.arms():
            arguments = get_args(arm.annotation)
            if isinstance(key, str) and key in arm.fields():
                yield KeyType.from_field(arm.annotation.model_fields[arm.fields()[key]])
            elif arm.holds(Mapping) and len(arguments) == 2:
                yield KeyType(arguments[1])
            elif arm.holds(*LISTS) and arguments and isinstance(key, int):
                yield KeyType(arguments[0])

    def fields(self) -> dict[str, str]:
        """Return a model's field names: from the name in the file to the name in the class."""
        if not self.holds(BaseModel):
            return {}
        fields: dict[str, FieldInfo] = self.annotation.model_fields
        aliases = {field.alias: name for name, field in fields.items() if field.alias}
        return aliases | {name: name for name in fields if name not in aliases.values()}

    def holds(self, *classes: type) -> bool:
        """Return whether the type, which is not a union, is a subclass of one of the classes."""
        origin = get_origin(self.annotation) or self.annotation
        return isinstance(origin, type) and issubclass(origin, classes)


def walk(value: Any, slot: KeyType, path: KeyPath = ()) -> Iterator[tuple[KeyPath, KeyType, Any]]:
    """Yield a part of a config and everything in it, each with its path in the file and its slot.

    Parts of a component have the slots of the component's class, where the config only knows the base class.
    """
    yield path, slot, value
    if isinstance(value, BaseModel):
        for key, name in KeyType(type(value)).fields().items():
            field = KeyType.from_field(type(value).model_fields[name])
            yield from walk(getattr(value, name), field, (*path, key))
    elif isinstance(value, Mapping | list | tuple):
        items: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            for below in slot.inner_slots(key):
                yield from walk(item, below, (*path, key))


def field_names(model: type[BaseModel]) -> set[str]:
    """Return all names that a model's fields accept: `num_generations` is also called `group`."""
    names = set(model.model_fields)
    for alias in (field.validation_alias for field in model.model_fields.values()):
        given = alias.choices if isinstance(alias, AliasChoices) else ()
        names |= {choice for choice in (alias, *given) if isinstance(choice, str)}
    return names


def show_value(value: Any) -> str:
    """Return a value as an error shows it: short, and without the content of a mapping or list."""
    if value is None:
        return "nothing"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, LISTS):
        return "a list"
    text = repr(value) if isinstance(value, str) else str(value)
    text = text.lower() if isinstance(value, bool) else text
    return text if len(text) <= 60 else f"{text[:59]}…"


def slot_in(config: BaseModel, path: KeyPath) -> KeyType | None:
    """Return the slot of a key in a config, by its components' classes; None without such a key."""
    slots = walk(config, KeyType(type(config)))
    return next((slot for inside, slot, _ in slots if join_path(inside) == join_path(path)), None)


def changeable_keys(config: BaseModel) -> list[str]:
    """Return all keys that a resumed run may change, as people type them."""
    return [
        join_path(path)
        for path, slot, _ in walk(config, KeyType(type(config)))
        if CHANGEABLE in slot.metadata
    ]


class Problems:
    """Collects the problems of a config: one sentence per key, in the order of the file."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._messages: dict[KeyPath, str] = {}
        """The first message for each path."""
        self.references: dict[KeyPath, str] = {}
        """The references that values came from. Messages show them instead of the values."""

    def add(self, path: KeyPath, text: str, *, at: KeyPath | None = None) -> None:
        """Add a problem with the value at a path; `at` is the place to look, if it is another."""
        message = f"{self._document.name(path)}: {text}" if path else text
        self._messages.setdefault(path if at is None else at, message)

    def add_missing(self, path: KeyPath, text: str) -> None:
        """Add a missing key; `text` continues the sentence."""
        self._messages.setdefault(path, f"key '{self._document.name(path)}' is missing{text}")

    def within(self, path: KeyPath) -> bool:
        """Return whether there is a problem at a path, or deeper."""
        return any(known[: len(path)] == path for known in self._messages)

    def add_validation(
        self, error: ValidationError, model: type[BaseModel], data: Any, prefix: KeyPath = ()
    ) -> None:
        """Add pydantic's errors for `data`, which is at `prefix`."""
        note = self._messages.setdefault
        expected: dict[KeyPath, list[str]] = {}
        """The expectations of a union's members, by location."""
        for details in error.errors(include_url=False):
            kind, path = details["type"], tuple[str | int, ...]()
            # The error's location without the parts that pydantic inserts for members of unions.
            for position, part in enumerate(details["loc"], start=1):
                is_missing = kind == "missing" and position == len(details["loc"])
                if is_missing or holds(value_at(data, path), part):
                    path = (*path, part)
            full_path = (*prefix, *path)
            if kind == "extra_forbidden":
                self._add_unknown(full_path, model, path)
            elif kind == "invalid_key" or details["loc"][-1:] == ("[key]",):
                note(full_path, f"key '{details['input']}' is not text; put it in quotes")
            elif kind == "missing":
                self.add_missing(full_path, "")
            elif kind in ("value_error", "assertion_error"):
                self.add(full_path, str(details["ctx"]["error"]))
            else:
                messages = expected.setdefault(full_path, [])
                if messages or full_path not in self._messages:
                    messages.append(details["msg"].removeprefix("Input ").partition(", unable to parse")[0])
                    self._messages.pop(full_path, None)
                    value = details["input"]
                    found = show_value(value)
                    names = [str(key).removesuffix("_tokens") for key in full_path[-2:]]
                    if isinstance(value, int | float):  # A number for `token_budget` is no token.
                        names = [name.rpartition("_")[2] for name in names]
                    if any(map(is_secret_name, names)):
                        found = f"something of type {type(value).__name__}"
                    if full_path in self.references:
                        found = f"what {self.references[full_path]} stands for"
                    self.add(full_path, f"{' or '.join(dict.fromkeys(messages))}, found {found}")

    def _add_unknown(self, full_path: KeyPath, model: type[BaseModel], path: KeyPath) -> None:
        slots = [KeyType(model)]
        for key in path[:-1]:
            slots = [inner for slot in slots for inner in slot.inner_slots(key)]
        allowed = [key for slot in slots for arm in slot.arms() for key in arm.fields()]
        instead = alternatives(str(path[-1]), allowed, otherwise="no keys")
        self._messages.setdefault(full_path, f"key '{self._document.name(full_path)}' is not known{instead}")

    def add_silent_errors(self, model: type[BaseModel], data: Any, prefix: KeyPath = ()) -> None:
        """Add what pydantic would not refuse in `data`, which is at `prefix`: unknown keys of models that do
        not set `extra`, and `true` and `false` for numbers."""
        for path, slot, value in walk(data, KeyType(model)):
            kinds = [arm.annotation for arm in slot.arms()]
            if isinstance(value, bool) and kinds and {*kinds} <= {int, float}:
                self.add((*prefix, *path), f"should be a number, found {show_value(value)}")
            models = [arm.annotation for arm in slot.arms() if arm.holds(BaseModel)]
            if isinstance(value, dict) and models == kinds and models:
                for key in value if not any("extra" in each.model_config for each in models) else ():
                    if next(slot.inner_slots(key), None) is None:
                        self._add_unknown((*prefix, *path, key), model, (*path, key))

    def raise_if_any(self) -> None:
        """Raise ConfigError with a line for each problem."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> ConfigError | None:
        """Return the error with a line for each problem; None without any."""
        errors = []
        for path, message in self._messages.items():
            source, line, column = self._document.place(path)
            if source is not None and source.startswith("-o "):  # The message need not repeat the key.
                message = message.removeprefix(f"{source[3:]}: ")
            errors.append(ConfigError(message, path=source, line=line, column=column))
        errors.sort(key=lambda error: (error.line is None, error.line, error.column))
        if not errors:
            return None
        errors[0].args = ("\n".join(map(str, errors)),)
        return errors[0]
