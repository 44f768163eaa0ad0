"""A config as written: its data, and where each key stands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

KeyPath: TypeAlias = tuple[str | int, ...]
"""The keys and list positions that lead to a value."""

Place: TypeAlias = tuple[str | None, int | None, int | None]
"""A source, a line and a column, as far as they are known."""


@dataclass(frozen=True, slots=True)
class Document:
    """The content of a config file, or of a mapping that took its place."""

    data: dict[str, Any]
    path: Path | None = None
    marks: Mapping[KeyPath, tuple[int, int]] = field(default_factory=dict)
    """Line and column, from 1, of each key and list item."""
    overridden: tuple[KeyPath, ...] = ()
    """What the command line set in place of the file."""

    def with_data(self, data: dict[str, Any], overridden: Iterable[KeyPath] = ()) -> Document:
        """The same places with other content, after the command line set the paths `overridden`."""
        return replace(self, data=data, overridden=(*self.overridden, *overridden))

    def place(self, path: KeyPath) -> Place:
        """Source, line and column of a key; of its nearest parent when it is not in the file itself."""
        for depth in range(len(path), -1, -1):
            if path[:depth] in self.overridden:
                return f"-o {dotted(path[:depth])}", None, None
            if path[:depth] in self.marks:
                return str(self.path), *self.marks[path[:depth]]
            for deeper in self.overridden:
                if deeper[:depth] == path:
                    return f"-o {dotted(deeper)}", None, None
        return str(self.path) if self.path else None, None, None


def dotted(path: KeyPath) -> str:
    """`a.b.0`: a path as people write it."""
    return ".".join(map(str, path))


def dig(data: Any, path: KeyPath) -> Any:
    """The value at a path, or None where there is nothing."""
    for key in path:
        if not holds(data, key):
            return None
        data = data[key]
    return data


def copied(data: Any) -> Any:
    """Mappings and lists anew, also those that an alias put in two places; other values as they are."""
    if isinstance(data, dict):
        return {key: copied(value) for key, value in data.items()}
    return [copied(value) for value in data] if isinstance(data, list) else data


def holds(data: Any, key: str | int) -> bool:
    """Whether `data` is a mapping with this key, or a list with this position."""
    if isinstance(data, list):
        return isinstance(key, int) and 0 <= key < len(data)
    return isinstance(data, dict) and key in data


def strings(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every string within `data`, with its path."""
    if isinstance(data, str):
        yield path, data
    elif isinstance(data, dict | list):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from strings(value, (*path, key))
