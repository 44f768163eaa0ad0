"""Notes of an import: keys of a foreign config that could not be taken over, or became something else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict

from etude.config.document import Document, KeyPath, dig, dotted
from etude.core.errors import ConfigError


class Note(BaseModel):
    """One key, and what became of it."""

    model_config = ConfigDict(frozen=True)

    key: str
    """The path of the key in the foreign file."""
    line: int | None
    """Its line there, from 1."""
    message: str
    """One sentence."""


@dataclass(slots=True)
class Notes:
    """All notes on one document, in the order in which they were made; and reading it, with checks."""

    document: Document
    made: list[Note] = field(default_factory=list)

    def add(self, path: KeyPath, message: str) -> None:
        """Note something about the key at a path."""
        _, line, _ = self.document.place(path)
        self.made.append(Note(key=dotted(path), line=line, message=message))

    def block(self, *path: str) -> dict[str, Any]:
        """The mapping at a path; an empty one where there is nothing. Raises ConfigError for others."""
        return self._checked(path, dict, "a mapping") or {}

    def number(self, *path: str) -> float | None:
        """The number at a path; None where there is nothing. Raises ConfigError for anything else."""
        return self._checked(path, int | float, "a number")

    def name(self, *path: str) -> str | None:
        """The text at a path; None where there is nothing. Raises ConfigError for anything else."""
        return self._checked(path, str, "a name") or None

    def _checked(self, path: KeyPath, kind: Any, expected: str) -> Any:
        """The value at a path; None where there is nothing. Raises ConfigError for another kind."""
        value = dig(self.document.data, path)
        if value is None or (isinstance(value, kind) and not isinstance(value, bool)):
            return value
        file, line, column = self.document.place(path)
        raise ConfigError(
            f"{dotted(path)}: expected {expected}, found {value!r:.80}", path=file, line=line, column=column
        )

    def unmapped(
        self, path: KeyPath, data: Mapping[str, Any], taken: Iterable[str], message: str = "left out"
    ) -> None:
        """Note every key of a mapping that was not taken over; keys without a value say nothing."""
        known = {"_type", *taken}
        for key, value in data.items():
            if key not in known and value is not None:
                self.add((*path, key), message)
