"""Printing: sentences, tables and JSON on standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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


def next_step(text: str) -> None:
    """The last line: what to do next."""
    print(f"\nnext: {text}", flush=True)


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


def path_shown(path: Path) -> str:
    """A path as one would type it here."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)
