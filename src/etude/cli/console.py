"""Printing: sentences, JSON, tables that fit the terminal, and a run's results.

In a pipe, each row of a table is one line.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from etude.core.evaluation import FailureCause
    from etude.engines.ledger import Bill
    from etude.preflight.finding import Findings
    from etude.store.figures import Summary

_NO_END = 100_000
"""Line width in a pipe or a file."""


def say(text: str = "") -> None:
    """Print a line of text."""
    print(text, flush=True)


def say_wrapped(text: str) -> None:
    """Print a sentence, wrapped to the width of the terminal."""
    say("\n".join(wrap_lines(text, line_width(), "  ")))


def say_fact(label: str, text: object) -> None:
    """Print a label and a text in two columns."""
    say_wrapped(f"{label:<15} {text}")


def warn(text: str) -> None:
    """Print a line on standard error."""
    print(text, file=sys.stderr, flush=True)


def emit(data: Any) -> None:
    """Print a JSON object on one line. Numbers that are not finite become null."""
    from etude.core.data_model import finite

    print(json.dumps(finite(data), ensure_ascii=False, allow_nan=False, default=str), flush=True)


def next_step(command: str) -> None:
    """Print the last line: the next command to type."""
    say(f"\nnext: {command}")


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None) -> None:
    """Print a table between empty lines. Cells that are None stay empty, and numbers are aligned right.

    Cells are folded if the table would be wider than the terminal.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    say()
    if title is not None:
        say("\n".join(wrap_lines(title, line_width())))
    drawn, rows = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False), list(rows)
    for index, name in enumerate(columns):
        is_number = all(isinstance(row[index], int | float | None) for row in rows)
        drawn.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*map(_text, row))
    text = StringIO()
    Console(file=text, width=line_width() or _NO_END, color_system=None, markup=False).print(drawn)
    say("\n".join(line.rstrip() for line in text.getvalue().splitlines()))


@dataclass(slots=True)
class Invocation:
    """How this process was called. `etude` fills it in when it begins."""

    folder: Path | None = None
    """The folder at the start (None: deleted), which an agent may change."""
    debug: bool = False
    """Whether tracebacks are shown."""


INVOCATION = Invocation()


def shown_path(path: Path) -> str:
    """Return a path as a user would type it here. It never begins like an option."""
    here = INVOCATION.folder or Path.cwd()
    path = path if path.is_absolute() else here / path
    shown = str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
    return f"./{shown}" if shown.startswith("-") else shown


def unused_folder(folder: Path, separator: str = "_") -> Path:
    """Return the folder, with a number after its name if that is needed for a new folder."""
    count, free = 1, folder
    while free.exists():
        count += 1
        free = folder.with_name(f"{folder.name}{separator}{count}")
    return free


def line_width() -> int | None:
    """Return the line width from COLUMNS or the terminal. None, without a limit, in a pipe or a file."""
    return shutil.get_terminal_size((0, 0)).columns or None


def wrap_lines(text: str, width: int | None, indent: str = "") -> list[str]:
    """Wrap text at `width` characters, without cutting words. `indent` begins all lines but the first."""
    wrap = textwrap.TextWrapper(
        width or _NO_END, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line for part in text.splitlines() or [""] for line in wrap.wrap(part) or [""]]


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


STATUS_SIGNS = {"ok": "✓", "warning": "!", "error": "✗"}
"""The mark before each finding."""


def show_findings(findings: Findings, facts: dict[str, Any], as_json: bool) -> None:
    """Print findings as lines, or together with other facts as a JSON object."""
    if as_json:
        emit({**facts, "findings": asdict(findings)["items"]})
        return
    for finding in findings.items:
        say_wrapped(f"{STATUS_SIGNS[finding.status]} {finding.what}: {finding.detail}")


def show_outcome(summary: Summary, epochs: str, run: Path) -> None:
    """Print the figures and versions of each model, the epochs, the warnings, and the plot's path."""
    from etude.show.metrics_files import PLOT

    for target, own in (summary.targets or {"": summary}).items():
        if target:
            say_fact("target", target)
        for label, text in own.lines():
            say_fact(label, text)
    say_fact("epochs", epochs)
    if summary.stopped:
        say_fact("stopped", f"early, by an alarm: {summary.stopped}")
    for text in summary.warnings:
        say_fact("warning", text)
    if (run / PLOT).exists():
        say_fact("plot", shown_path(run / PLOT))


def show_troubles(run: Path, calls: Mapping[str, int], causes: Sequence[FailureCause]) -> None:
    """Print counts of cut-off answers, repeated calls and failed tools, and the causes of failures.

    Each cause has a command that shows one of its episodes. `calls` are counts of an evaluation's output.
    """
    from etude.loop.alarms import CutOffAnswers
    from etude.store.figures import show_command

    cut_off, retries = CutOffAnswers().seen_in(calls), calls.get("retries", 0)
    if cut_off:
        say_fact("warning", f"{cut_off}; {CutOffAnswers.remedy}")
    if retries:
        say_fact("retries", f"{retries} attempts at model calls gave no usable answer, and were made again")
    if calls.get("tool_failed"):
        say_fact("tools", f"{calls['tool_failed']} of {calls['tool_calls']} calls of tools had no answer")
    for cause in causes[:5]:
        say_fact("failed", cause)
        # Not wrapped, since it is a command to copy.
        say(f"                {show_command(shown_path(run), cause.episode)}")


def show_bill(bill: Bill) -> None:
    """Print the run's usage. If it cost money, also print it by model and role."""
    from etude.core.stats import shown_seconds
    from etude.engines.ledger import format_usd

    whole = bill.total
    if not bill.lines:
        return
    costs = f"{format_usd(whole.usd)}, " if whole.usd or not whole.unpriced_tokens else ""
    has_both = whole.usd and whole.unpriced_tokens
    unpriced = f" ({whole.unpriced_tokens:,} of them without a price)" if has_both else ""
    took = f"{whole.tokens:,} tokens{unpriced} in {whole.calls:,} calls"
    say_fact("spent", f"{costs}{took}, {shown_seconds(bill.seconds)} at work")
    if not whole.usd:
        return
    rows = [
        (
            *(line.model, line.role or "–", line.calls, line.prompt_tokens, line.cached_tokens),
            *(line.completion_tokens, line.trained_tokens, format_usd(line.usd)),
        )
        for line in bill.by("model", "role")
    ]
    table(("model", "role", "calls", "prompt", "cached", "sampled", "trained", "usd"), rows)
