"""All that is wrong with a config, collected and reported together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from etude.config.document import Document, KeyPath, Place, dig, dotted, holds
from etude.config.nearest import alternatives, nearest
from etude.config.slots import Slot, describe, keys_of, shown, slot_at
from etude.core.errors import ConfigError

_DEEPEST = 4
_SECRET_WORDS = ("key", "token", "secret", "password")


class Problems:
    """One sentence per key, in the order of the file."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._messages: dict[KeyPath, str] = {}
        self.references: dict[KeyPath, str] = {}
        """The text of each value that came from the environment; shown in place of that value."""

    def add(self, path: KeyPath, message: str) -> None:
        """Note what is wrong at a path. The first thing that is said of a path stands."""
        self._messages.setdefault(path, message)

    def within(self, path: KeyPath) -> bool:
        """Whether there is a problem at a path, or deeper."""
        return any(known[: len(path)] == path for known in self._messages)

    def add_unknown(self, paths: Iterable[KeyPath], model: type[BaseModel], prefix: KeyPath) -> None:
        """Note keys that `model`, which stands at `prefix`, does not have."""
        for path in paths:
            self.add((*prefix, *path), _unknown_key(model, path, prefix))

    def add_validation(
        self, error: ValidationError, model: type[BaseModel], data: Any, prefix: KeyPath = ()
    ) -> list[KeyPath]:
        """Note what pydantic found in `data`, which stands at `prefix`; the paths within `data`."""
        paths = []
        for details in error.errors(include_url=False):
            path, kind = _real_path(details, data), details["type"]
            paths.append(path)
            if kind == "extra_forbidden":
                message = _unknown_key(model, path, prefix)
            elif kind == "invalid_key" or details["loc"][-1:] == ("[key]",):
                message = f"key '{details['input']}' is not text; put it in quotes"
            elif kind == "missing":
                message = f"key '{dotted((*prefix, *path))}' is missing{_expects(model, path)}"
            else:
                message = self._wrong_value(details, model, path, prefix)
            self.add((*prefix, *path), message)
        return paths

    def raise_if_any(self) -> None:
        """Raises ConfigError with a line for each problem."""
        error = self.error()
        if error is not None:
            raise error

    def error(self) -> ConfigError | None:
        """The error with a line for each problem; None without any."""
        if not self._messages:
            return None
        placed = [self._placed(path, message) for path, message in self._messages.items()]
        placed.sort(key=lambda item: (item[0][1] is None, item[0][1], item[0][2]))
        (path, line, column), first = placed[0]
        others = [str(ConfigError(message, path=p, line=n, column=c)) for (p, n, c), message in placed[1:]]
        return ConfigError("\n".join([first, *others]), path=path, line=line, column=column)

    def _placed(self, path: KeyPath, message: str) -> tuple[Place, str]:
        """Where a message belongs. One on an override begins with its key, and need not name it again."""
        location, key = self._document.place(path), dotted(path)
        return location, message.removeprefix(f"{key}: ") if location[0] == f"-o {key}" else message

    def _wrong_value(
        self, details: ErrorDetails, model: type[BaseModel], path: KeyPath, prefix: KeyPath
    ) -> str:
        full_path = (*prefix, *path)
        where = f"{dotted(full_path)}: " if full_path else ""
        if details["type"] in ("value_error", "assertion_error"):
            return f"{where}{details['ctx']['error']}"
        slot = slot_at(model, path)
        expected = f"expected {describe(slot)}" if slot else details["msg"]
        return f"{where}{expected}, found {self._shown(full_path, details['input'], slot)}"

    def _shown(self, path: KeyPath, value: Any, slot: Slot | None) -> str:
        if path in self.references:
            return f"what {self.references[path]} stands for"
        is_secret = any(word in str(path[-1:]).lower() for word in _SECRET_WORDS)
        is_unquoted = slot is not None and describe(slot).startswith("text") and not isinstance(value, str)
        text = f"something of type {type(value).__name__}" if is_secret else shown(value)
        return f"{text}; put it in quotes" if is_unquoted and isinstance(value, int | float | date) else text


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


def _expects(model: type[BaseModel], path: KeyPath) -> str:
    slot = slot_at(model, path)
    return f"; it takes {describe(slot)}" if slot else ""


def _keys_called(name: str, model: type[BaseModel], path: KeyPath = ()) -> Iterator[KeyPath]:
    """Where in the whole model there is a key of this name, as after a wrong indentation."""
    for key in keys_of(slot_at(model, path)):
        if key == name:
            yield (*path, key)
        if len(path) < _DEEPEST:
            yield from _keys_called(name, model, (*path, key))
