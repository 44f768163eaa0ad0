"""A run in a line: its state, how far it is, and its first and last reward, as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etude.core.stats import shown_mean
from etude.store.figure_words import shown_figure, shown_score

if TYPE_CHECKING:
    from etude.store.facts import RunFacts


_OF_VALIDATION = (("before", "before"), ("after", "after"))
_OF_EPOCHS = (("in the first epoch", "first_epoch"), ("in the last epoch", "last_epoch"))


def by_target(summary: Mapping[str, Any]) -> Mapping[str | None, Mapping[str, Any]]:
    """The summary of each model that is trained; by None where there is one."""
    return summary.get("targets") or {None: summary}


def shown_state(facts: RunFacts) -> str:
    """Whether it goes on, is over, or cannot be read and why."""
    if facts.in_use_by is not None:
        return f"running (process {facts.in_use_by})"
    if facts.problem is not None:
        return f"unreadable: {facts.problem}"
    is_empty = facts.kind == "train" and facts.state == "finished" and not facts.summary.get("epochs_trained")
    return "finished, trained on nothing" if is_empty else facts.state


def shown_other_inputs(count: int) -> str:
    """Why examples are not compared whose ids both runs have."""
    examples = "1 id stands" if count == 1 else f"{count} ids stand"
    return (
        f"{examples} for other inputs, or another expected answer, than there; such examples are not compared"
    )


def shown_epochs(facts: RunFacts) -> str | None:
    """`3/10`; None of an evaluation, which has none."""
    if facts.kind != "train" or facts.state == "unreadable":
        return None
    return f"{facts.epochs_done}/{facts.num_epochs or '?'}"


def shown_ends(facts: RunFacts) -> list[str | None]:
    """The first and the last reward: of validations, or else of epochs, which say that they are.

    Of an evaluation only the last.
    """
    if facts.kind == "evaluate":
        result = facts.result or {}
        scores = (result.get("scores") or {}).get(result.get("reward")) or {}
        return [None, _interval(scores.get("mean"), scores.get("low"), scores.get("high"))]
    if not facts.summary.get("targets"):
        return _ends_of(facts.summary)
    ends = {name: _ends_of(summary, short=True) for name, summary in by_target(facts.summary).items()}
    return [", ".join(f"{name} {own[when] or '–'}" for name, own in ends.items()) for when in (0, 1)]


def _ends_of(summary: Mapping[str, Any], *, short: bool = False) -> list[str | None]:
    """Those of one model; `short` leaves the intervals out."""
    is_validated = summary.get("before") or summary.get("after")
    ends = []
    for key in ("before", "after") if is_validated else ("first_epoch", "last_epoch"):
        figure = summary.get(key) or {}
        low, high = (None, None) if short else (figure.get("reward_low"), figure.get("reward_high"))
        shown = _interval(figure.get("avg_reward"), low, high)
        ends.append(shown if shown is None or is_validated else f"{shown} in epoch {figure['epoch']}")
    return ends


def _interval(mean: float | None, low: float | None, high: float | None) -> str | None:
    return None if mean is None else shown_mean(mean, low, high)


def imported_lines(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The counts of an imported log, as labels and texts."""
    failed = f", {counts['failed']} of them ended in an error" if counts["failed"] else ""
    scores = ", ".join(f"{name} ({count})" for name, count in counts["scores"].items())
    several = f"{counts['compared']} with several chats"
    return [
        ("chats", f"{counts['chats']} with {counts['calls']} calls{failed}"),
        ("prompts", f"{counts['prompts']}, {several}, {counts['held_out']} held out"),
        *([("feedback", scores)] if scores else []),
    ]


def side_by_side(facts: list[RunFacts]) -> list[tuple[Any, ...]]:
    """Rows of what was measured in the runs: before and after training, the reward and each evaluator."""
    columns = [_columns(run) for run in facts]
    labels = list(dict.fromkeys(label for column in columns for label in column))
    return [(label, *(column.get(label) for column in columns)) for label in labels]


def _columns(facts: RunFacts) -> dict[str, str]:
    if facts.kind == "evaluate":
        result = facts.result or {}
        scores = dict(result.get("scores") or {})
        if result.get("reward") in scores:
            scores = {"reward": scores[result["reward"]], **scores}
        return {name: shown_score(score) for name, score in scores.items()}
    column = {}
    for target, summary in by_target(facts.summary).items():
        whose = "" if target is None else f"{target} "
        is_validated = summary["before"] or summary["after"]
        for when, key in _OF_VALIDATION if is_validated else _OF_EPOCHS:
            if summary[key] is not None:
                column[f"{whose}reward {when}"] = shown_figure(summary[key])
                for name, score in summary[key]["evaluators"].items():
                    column[f"{whose}{name} {when}"] = shown_score(score)
    return column
