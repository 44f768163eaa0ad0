"""Notes of an import: what of a foreign config could not be taken over, or became something else."""

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
    said: str
    """One sentence."""


@dataclass(slots=True)
class Notes:
    """All notes on one document, in the order in which they were made; and reading it, with checks."""

    document: Document
    found: list[Note] = field(default_factory=list)

    def add(self, path: KeyPath, said: str) -> None:
        """Note something about the key at a path."""
        _, line, _ = self.document.place(path)
        self.found.append(Note(key=dotted(path), line=line, said=said))

    def block(self, *path: str) -> dict[str, Any]:
        """The mapping at a path; an empty one where there is nothing. Raises ConfigError for others."""
        found = dig(self.document.data, path)
        if found is None:
            return {}
        if not isinstance(found, dict):
            raise self._wrong(path, f"expected a mapping, found {found!r:.80}")
        return found

    def number(self, *path: str) -> float | None:
        """The number at a path; None where there is nothing. Raises ConfigError for anything else."""
        found = dig(self.document.data, path)
        if found is not None and (isinstance(found, bool) or not isinstance(found, int | float)):
            raise self._wrong(path, f"expected a number, found {found!r:.80}")
        return found

    def name(self, *path: str) -> str | None:
        """The text at a path; None where there is nothing. Raises ConfigError for anything else."""
        found = dig(self.document.data, path)
        if found is not None and not isinstance(found, str):
            raise self._wrong(path, f"expected a name, found {found!r:.80}")
        return found or None

    def _wrong(self, path: KeyPath, what: str) -> ConfigError:
        file, line, column = self.document.place(path)
        return ConfigError(f"{dotted(path)}: {what}", path=file, line=line, column=column)

    def unmapped(
        self, path: KeyPath, data: Mapping[str, Any], taken: Iterable[str], said: str = "left out"
    ) -> None:
        """Note every key of a mapping that was not taken over; keys without a value say nothing."""
        known = {"_type", *taken}
        for key, value in data.items():
            if key not in known and value is not None:
                self.add((*path, key), said)
