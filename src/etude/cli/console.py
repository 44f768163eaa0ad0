"""Printing: sentences, tables and JSON on standard output."""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.cli.tables import line_width, table_lines, wrapped

AND = "&&"
"""Between two commands, in the words of a hint."""


def say(text: str = "") -> None:
    """A line of text."""
    print(text, flush=True)


def say_wrapped(text: str) -> None:
    """A sentence, on more lines where the terminal is narrow."""
    say("\n".join(wrapped(text, line_width(), "  ")))


def warn(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def emit(data: Any) -> None:
    """A JSON object on a line of its own; numbers that are not finite become null."""
    from etude.core.numbers import finite

    print(json.dumps(finite(data), ensure_ascii=False, allow_nan=False, default=str), flush=True)


@dataclass(frozen=True, slots=True)
class Hint:
    """A command to type next."""

    name: str
    """The function in `etude.cli.hints` that made it."""
    words: tuple[str, ...]

    @property
    def command(self) -> str:
        """As one types it in a shell."""
        return " ".join(word if word == AND else shlex.quote(word) for word in self.words)

    @property
    def line(self) -> str:
        """As it is printed."""
        return f"next: {self.command}"


def next_step(hint: Hint) -> None:
    """The last line: what to type next."""
    print(f"\n{hint.line}", flush=True)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    sentences: Collection[str] = (),
) -> None:
    """A table, as `table_lines` lays it out, with an empty line around it."""
    width = line_width()
    say()
    if title is not None:
        say("\n".join(wrapped(title, width)))
    say("\n".join(table_lines(columns, list(rows), width=width, sentences=sentences)))


_HERE: ContextVar[Path | None] = ContextVar("etude_here", default=None)
_TYPED: ContextVar[tuple[str, ...]] = ContextVar("etude_typed", default=())


def remember_typing(words: Sequence[str]) -> None:
    """Take note of what was typed after `etude`, and where: an agent may change the folder."""
    # Without one (somebody has deleted it), paths are shown as they are.
    with contextlib.suppress(FileNotFoundError):
        _HERE.set(Path.cwd())
    _TYPED.set(tuple(words))


def typed_words() -> tuple[str, ...]:
    """What was typed after `etude`."""
    return _TYPED.get()


def path_shown(path: Path) -> str:
    """A path as one would type it here; never one that begins like an option."""
    here = _HERE.get() or Path.cwd()
    path = path if path.is_absolute() else here / path
    shown = str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
    return f"./{shown}" if shown.startswith("-") else shown
