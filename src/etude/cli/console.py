"""Printing: sentences, tables and JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.cli.hints import Hint

_PIPE_WIDTH = 160
"""Characters of a line where the output is no terminal, so that tables are not broken."""


def say(text: str = "") -> None:
    """A line of text."""
    print(text, flush=True)


def warn(text: str) -> None:
    """A line on standard error."""
    print(text, file=sys.stderr, flush=True)


def emit(data: Any) -> None:
    """A JSON object on a line of its own; numbers that are not finite become null."""
    from etude.epochs.metrics import finite

    print(json.dumps(finite(data), ensure_ascii=False, allow_nan=False, default=str), flush=True)


def next_step(hint: Hint) -> None:
    """The last line: what to type next."""
    print(f"\n{hint.line}", flush=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """A table; cells that are None stay empty, and numbers stand at the right."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = [list(row) for row in rows]
    made = Table(title=title, box=SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for place, column in enumerate(columns):
        numeric = all(isinstance(row[place], int | float | None) for row in shown)
        made.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in shown:
        made.add_row(*(Text("" if cell is None else _cell(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False, highlight=False).print(made)


_HERE: ContextVar[Path | None] = ContextVar("etude_here", default=None)
_TYPED: ContextVar[tuple[str, ...]] = ContextVar("etude_typed", default=())


def remember_typing(words: Sequence[str]) -> None:
    """Take note of what was typed after `etude`, and where: an agent may change the folder."""
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


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
