"""All that is wrong with a config, collected and reported together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from etude.config.document import Document, KeyPath, dig, dotted, holds
from etude.config.nearest import alternatives, nearest
from etude.config.slots import Slot, describe, keys_of, shown, slot_at, truths_for_numbers
from etude.core.errors import ConfigError
from etude.core.secrets import is_secret_name

_DEEPEST = 4


class Problems:
    """One sentence per key, in the order of the file."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._messages: dict[KeyPath, str] = {}
        self.references: dict[KeyPath, str] = {}
        """The text of each value that came from the environment; shown in place of that value."""

    def add(self, path: KeyPath, text: str, *, at: KeyPath | None = None) -> None:
        """Note what is wrong with the value at a path; `at` is where the reader has to look, if not there."""
        self._note(path if at is None else at, f"{dotted(path)}: {text}" if path else text)

    def add_missing(self, path: KeyPath, text: str) -> None:
        """Note a key that is missing; `text` goes on with the sentence."""
        self._note(path, f"key '{dotted(path)}' is missing{text}")

    def _note(self, path: KeyPath, message: str) -> None:
        """The first thing that is said of a path stands."""
        self._messages.setdefault(path, message)

    def within(self, path: KeyPath) -> bool:
        """Whether there is a problem at a path, or deeper."""
        return any(known[: len(path)] == path for known in self._messages)

    def add_unknown(self, paths: Iterable[KeyPath], model: type[BaseModel], prefix: KeyPath) -> None:
        """Note keys that `model`, which stands at `prefix`, does not have."""
        for path in paths:
            self._note((*prefix, *path), _unknown_key(model, path, prefix))

    def add_truths(self, model: type[BaseModel], data: Any, prefix: KeyPath = ()) -> None:
        """Note each `true` and `false` in `data`, which stands at `prefix`, that is to be a number."""
        for path, slot in truths_for_numbers(Slot(model), data):
            self.add((*prefix, *path), f"expected {describe(slot)}, found {shown(dig(data, path))}")

    def add_validation(
        self, error: ValidationError, model: type[BaseModel], data: Any, prefix: KeyPath = ()
    ) -> list[KeyPath]:
        """Note what pydantic found in `data`, which stands at `prefix`; the paths within `data`."""
        paths = []
        for details in error.errors(include_url=False):
            path, kind = _real_path(details, data), details["type"]
            paths.append(path)
            full_path, slot = (*prefix, *path), slot_at(model, path)
            if kind == "extra_forbidden":
                self._note(full_path, _unknown_key(model, path, prefix))
            elif kind == "invalid_key" or details["loc"][-1:] == ("[key]",):
                self._note(full_path, f"key '{details['input']}' is not text; put it in quotes")
            elif kind == "missing":
                self.add_missing(full_path, f"; it takes {describe(slot)}" if slot else "")
            elif kind in ("value_error", "assertion_error"):
                self.add(full_path, str(details["ctx"]["error"]))
            else:
                expected = f"expected {describe(slot)}" if slot else details["msg"]
                self.add(full_path, f"{expected}, found {self._shown(full_path, details['input'], slot)}")
        return paths

    def raise_if_any(self) -> None:
        """Raises ConfigError with a line for each problem."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> ConfigError | None:
        """The error with a line for each problem; None without any."""
        errors = [self._located(path, message) for path, message in self._messages.items()]
        errors.sort(key=lambda error: (error.line is None, error.line, error.column))
        if not errors:
            return None
        errors[0].args = ("\n".join(map(str, errors)),)
        return errors[0]

    def _located(self, path: KeyPath, message: str) -> ConfigError:
        """A message with its place. One on an override begins with its key, and need not name it again."""
        source, line, column = self._document.place(path)
        if source == f"-o {dotted(path)}":
            message = message.removeprefix(f"{dotted(path)}: ")
        return ConfigError(message, path=source, line=line, column=column)

    def _shown(self, path: KeyPath, value: Any, slot: Slot | None) -> str:
        if path in self.references:
            return f"what {self.references[path]} stands for"
        is_secret = any(is_secret_name(str(key)) for key in path[-2:])
        is_unquoted = slot is not None and describe(slot).startswith("text") and not isinstance(value, str)
        text = f"something of type {type(value).__name__}" if is_secret else shown(value)
        return f"{text}; put it in quotes" if is_unquoted and isinstance(value, int | float) else text


def _real_path(details: ErrorDetails, data: Any) -> KeyPath:
    """The error's location without what pydantic puts in for the members of unions."""
    path: KeyPath = ()
    for position, part in enumerate(details["loc"]):
        is_missing = details["type"] == "missing" and position == len(details["loc"]) - 1
        if is_missing or holds(dig(data, path), part):
            path = (*path, part)
    return path


def _unknown_key(model: type[BaseModel], path: KeyPath, prefix: KeyPath) -> str:
    name, allowed = str(path[-1]), keys_of(slot_at(model, path[:-1]))
    message = f"key '{dotted((*prefix, *path))}' is not known"
    home = None if nearest(name, allowed) else next(_keys_called(name, model), None)
    if home is not None:
        message += f" here; it belongs in '{dotted((*prefix, *home[:-1]))}'"
    return message + alternatives(name, allowed, otherwise="no keys")


def _keys_called(name: str, model: type[BaseModel], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Where in the whole model there is a key of this name, as after a wrong indentation."""
    for key in keys_of(slot_at(model, path)):
        if key == name:
            yield (*path, key)
        if len(path) < _DEEPEST:
            yield from _keys_called(name, model, (*path, key))
