"""Printing what a run measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.cli.console import path_shown, say, say_wrapped, table

if TYPE_CHECKING:
    from etude.budget.bill import Bill
    from etude.core.history import Entry, History

_CAUSES = 5
"""Causes of failures that are shown."""


def show_outcome(summary: Mapping[str, Any], epochs: str, run: Path) -> None:
    """The figures and versions of each model, how many epochs, the warnings, and where the plot is."""
    from etude.report.files import PLOT
    from etude.report.words import by_target, figure_lines

    for target, own in by_target(summary).items():
        if target is not None:
            say(f"target          {target}")
        for label, text in figure_lines(own):
            say_wrapped(f"{label:<15} {text}")
    say(f"epochs          {epochs}")
    if summary["stopped"]:
        say_wrapped(f"stopped         early, by an alarm: {summary['stopped']}")
    for text in summary["warnings"]:
        say_wrapped(f"warning         {text}")
    if (run / PLOT).exists():
        say(f"plot            {path_shown(run / PLOT)}")


def show_evaluators(history: History) -> None:
    """The mean of each evaluator with its interval, in everything that was measured."""
    from etude.report.words import evaluators_in
    from etude.store.figures import figure_of, short_name, shown_score

    measured = (entry for entry in history.epochs if entry.resting is None)
    entries: list[Entry] = [*history.measured, *measured]
    names = evaluators_in([figure_of(entry) for entry in entries])
    rows = [
        (name, short_name(entry), shown_score(score))
        for name in names
        for entry in entries
        if (score := (entry.metrics.get("evaluators") or {}).get(name)) is not None
    ]
    if rows:
        table(("evaluator", "measured on", "mean, 95 % interval, n"), rows)


def show_troubles(run: Path, calls: Mapping[str, int], causes: list[dict[str, Any]]) -> None:
    """Answers that were cut off, calls that were made again, tools that did not answer, and why episodes and
    scores failed, with the command that shows one of them.

    `calls` are those of an evaluation run's output.
    """
    from etude.alarms.built_in import CutOffAnswers
    from etude.store.figures import show_command, shown_cause

    cut_off, retries = CutOffAnswers().seen_in(calls), calls.get("retries", 0)
    if cut_off:
        say_wrapped(f"warning         {cut_off}; {CutOffAnswers.remedy}")
    if retries:
        text = f"{retries} attempts at model calls gave no usable answer, and were made again"
        say_wrapped(f"retries         {text}")
    if calls.get("tool_failed"):
        text = f"{calls['tool_failed']} of {calls['tool_calls']} calls of tools had no answer"
        say_wrapped(f"tools           {text}")
    for cause in causes[:_CAUSES]:
        say_wrapped(f"failed          {shown_cause(cause)}")
        say(f"                {show_command(path_shown(run), cause)}")


def show_bill(bill: Bill) -> None:
    """All that the run took; where it cost money, also by model and role, and by part of the run."""
    from etude.budget.ledger import shown_usd
    from etude.report.progress import shown_time

    whole = bill.total
    if not bill.lines:
        return
    costs = f"{shown_usd(whole.usd)}, " if whole.usd or not whole.unpriced_tokens else ""
    has_both = whole.usd and whole.unpriced_tokens
    unpriced = f" ({whole.unpriced_tokens:,} of them without a price)" if has_both else ""
    took = f"{whole.tokens:,} tokens{unpriced} in {whole.calls:,} calls"
    say_wrapped(f"spent           {costs}{took}, {shown_time(bill.seconds)} at work")
    if not whole.usd:
        return
    amounts = ("calls", "prompt", "cached", "sampled", "trained", "usd")
    for names, columns in ((("model", "role"), ("model", "role")), (("phase",), ("part or job",))):
        rows = [
            (
                *(getattr(line, name) or "–" for name in names),
                *(line.calls, line.prompt_tokens, line.cached_tokens, line.completion_tokens),
                *(line.trained_tokens, shown_usd(line.usd)),
            )
            for line in bill.by(*names)
        ]
        table((*columns, *amounts), rows)
