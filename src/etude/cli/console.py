"""Printing: sentences, JSON, hints, and tables that fit a terminal.

Nothing in a table is cut, and names can be copied whole.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Collection, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.preflight.finding import Findings

_GAP = "  "
_INDENT = "    "


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
    from etude.core.data_model import finite

    print(json.dumps(finite(data), ensure_ascii=False, allow_nan=False, default=str), flush=True)


def next_line(command: str) -> str:
    """The command to type next, as it is printed."""
    return f"next: {command}"


def next_step(command: str) -> None:
    """The last line: what to type next."""
    say(f"\n{next_line(command)}")


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
    """The words that were typed after `etude`."""
    return _TYPED.get()


def path_shown(path: Path) -> str:
    """A path as one would type it here; never one that begins like an option."""
    here = _HERE.get() or Path.cwd()
    path = path if path.is_absolute() else here / path
    shown = str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
    return f"./{shown}" if shown.startswith("-") else shown


def unused(folder: Path, separator: str = "_") -> Path:
    """The folder, or the same with a number after its name, that does not exist yet."""
    count, free = 1, folder
    while free.exists():
        count += 1
        free = folder.with_name(f"{folder.name}{separator}{count}")
    return free


def line_width() -> int | None:
    """Columns of a line, by COLUMNS or the terminal. None in a pipe or a file: lines have no end there."""
    return shutil.get_terminal_size((0, 0)).columns or None


def table_lines(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    width: int | None = None,
    sentences: Collection[str] = (),
) -> list[str]:
    """The lines of a table: a row on a line where that fits into `width`, else its cells under its first one.

    Cells that are None stay empty, and numbers stand at the right. Where there is no room for those of the
    columns `sentences`, they stand below their rows, wrapped between words. All others are kept whole.
    """
    texts = [[_text(cell) for cell in row] for row in rows]
    below: list[list[str]] = [[] for _ in rows]
    widths = _widths(columns, texts)
    if width is not None and _total(widths) > width:
        _move_sentences(columns, texts, below, width, sentences)
        widths = _widths(columns, texts)
        if _total(widths) > width:
            stacked = [_stacked(columns, row, width) for row in texts]
            return [line for row, more in zip(stacked, below, strict=True) for line in (*row, *more)]
    numeric = [
        all(isinstance(row[column], int | float | None) for row in rows) for column in range(len(columns))
    ]
    lines = [_row(columns, widths, numeric), "─" * _total(widths)]
    for row, sentence in zip(texts, below, strict=True):
        lines += [_row(row, widths, numeric), *sentence]
    return lines


def wrapped(text: str, width: int | None, indent: str = "") -> list[str]:
    """Text in lines of at most `width` columns, `indent` before all but the first; no word is ever cut."""
    lines: list[str] = []
    for part in text.splitlines() or [""]:
        words = part.lstrip().split(" ")
        line = part[: len(part) - len(part.lstrip())] + words[0]
        for word in words[1:]:
            if width is not None and cell_width(f"{line} {word}") > width:
                lines.append(line)
                line = indent + word
            else:
                line = f"{line} {word}"
        lines.append(line)
    return lines


def cell_width(text: str) -> int:
    """Columns that a terminal gives to a text."""
    from rich.cells import cell_len

    return cell_len(text)


def said_once(reasons: Sequence[str | None]) -> list[str | None]:
    """The same reasons, with `as before` in place of each that is the one that was said last."""
    last: str | None = None
    shown = []
    for reason in reasons:
        shown.append("as before" if reason is not None and reason == last else reason)
        last = last if reason is None else reason
    return shown


def _widths(columns: Sequence[str], texts: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(cell_width, cells)) for cells in zip(columns, *texts, strict=True)]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _move_sentences(
    columns: Sequence[str],
    texts: Sequence[list[str]],
    below: Sequence[list[str]],
    width: int,
    sentences: Collection[str],
) -> None:
    """Take the sentences that are too long for a column out of their rows, to stand below them."""
    indices = [column for column, name in enumerate(columns) if name in sentences]
    widths = _widths(columns, texts)
    others = sum(size + len(_GAP) for column, size in enumerate(widths) if column not in indices)
    room = (width - others) // max(1, len(indices)) - len(_GAP)
    for row, lines in zip(texts, below, strict=True):
        for column in indices:
            if row[column] and cell_width(row[column]) > room:
                lines += wrapped(f"{_INDENT}{columns[column]}: {row[column]}", width, _INDENT)
                row[column] = ""


def _row(texts: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> str:
    cells = []
    for text, width, right in zip(texts, widths, numeric, strict=True):
        space = " " * (width - cell_width(text))
        cells.append(space + text if right else text + space)
    return _GAP.join(cells).rstrip()


def _stacked(columns: Sequence[str], row: Sequence[str], width: int) -> list[str]:
    """A row as its first cell, and the others with their names below it, as many to a line as fit."""
    lines = [f"{columns[0]} {row[0]}" if row[0].isdecimal() else row[0], ""]
    for name, text in zip(columns[1:], row[1:], strict=True):
        pair = f"{_GAP}{name} {text}"
        if not text:
            continue
        if cell_width(pair) > width:
            lines += [_GAP + name, _INDENT + text, ""]
        elif lines[-1] and cell_width(lines[-1] + pair) > width:
            lines.append(pair)
        else:
            lines[-1] += pair
    return [line for line in lines if line]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


MARKS = {"ok": "✓", "warning": "!", "error": "✗"}
"""Before each finding."""


def show_findings(findings: Findings, facts: dict[str, Any], as_json: bool) -> None:
    """Findings as lines; or with other facts as a JSON object."""
    if as_json:
        emit({**facts, "findings": asdict(findings)["items"]})
        return
    for finding in findings.items:
        say_wrapped(f"{MARKS[finding.status]} {finding.what}: {finding.detail}")
