"""A run in words: its state, its progress, its measurements and its versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.history import Score
from etude.core.job import ModelVersion
from etude.store.figures import VALIDATION, Summary

if TYPE_CHECKING:
    from etude.store.facts import RunFacts

VALIDATION_KEY = "finetuning.run_configuration.validation_dataset"


def shown_state(facts: RunFacts) -> str:
    """Return whether the run is active, finished or unfinished, or why it cannot be read."""
    if facts.in_use_by is not None:
        return f"running (process {facts.in_use_by})"
    if facts.problem is not None:
        return f"unreadable: {facts.problem}"
    is_empty = facts.kind == "train" and facts.state == "finished" and not facts.summary.epochs_trained
    return "finished, trained on nothing" if is_empty else facts.state


def shown_epochs(facts: RunFacts) -> str | None:
    """Return the epochs as `3/10`; None for an evaluation, which has none."""
    if facts.kind != "train" or facts.state == "unreadable":
        return None
    return f"{facts.epochs_done}/{facts.num_epochs or '?'}"


def first_and_last_reward(facts: RunFacts) -> list[str | None]:
    """Return the first and last reward, of validations if there are any. Evaluations have only the last."""
    if facts.kind == "evaluate":
        result = facts.result or {}
        score = Score.model_validate((result.get("scores") or {}).get(result.get("reward")) or {})
        return [None, None if score.mean is None else score.interval]
    if not facts.summary.targets:
        return _list_ends(facts.summary)
    ends = {name: _list_ends(summary, short=True) for name, summary in facts.summary.targets.items()}
    return [", ".join(f"{name} {own[when] or '–'}" for name, own in ends.items()) for when in (0, 1)]


def _list_ends(summary: Summary, *, short: bool = False) -> list[str | None]:
    ends: list[str | None] = []
    for figure in summary.ends.values():
        if figure is None or figure.avg_reward is None:
            ends.append(None)
            continue
        shown = str(Score(mean=figure.avg_reward)) if short else figure.reward.interval
        ends.append(shown if summary.is_validated else f"{shown} in epoch {figure.epoch}")
    return ends


def imported_lines(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the counts of an imported log, as labels and texts."""
    scores = ", ".join(f"{name} ({count})" for name, count in counts["scores"].items())
    several = f"{counts['compared']} with several chats"
    return [
        ("chats", f"{counts['chats']} with {counts['calls']} calls"),
        ("prompts", f"{counts['prompts']}, {several}, {counts['held_out']} held out"),
        *([("feedback", scores)] if scores else []),
    ]


def figure_lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield labels and texts of one model's summary: its rewards, other evaluators, best and last version."""
    if (warm_up := summary.warm_up) is not None:
        version = "" if warm_up.version is None else f": v{warm_up.version}"
        value = "" if warm_up.loss is None else f", loss {warm_up.loss:.3f}"
        if warm_up.avg_reward is not None:
            value = f", reward {warm_up.reward} n={warm_up.n} (training examples)"
        yield "warm-up", f"{warm_up.steps} steps of imitation{value}{version}"
    validated = summary.measured_on == VALIDATION
    known = {"before": summary.before, "warm": summary.warm, "after": summary.after}
    if not validated:
        known = {"first": summary.first_epoch, "last": summary.last_epoch}
    figures = {key: figure for key, figure in known.items() if figure is not None}
    for key, figure in figures.items():
        when = f" {key}" if figures.keys() & {"before", "warm"} else ""
        yield f"reward{when}", f"{figure.reward.counted}  ({figure.measured})"
        if (found := figure.distribution) is not None:
            yield f"distribution{when}", f"{found}: {found.shown_bars()}"
    names = list(dict.fromkeys(name for figure in figures.values() for name in figure.evaluators))
    for name in names:
        scores = [figure.evaluators.get(name, Score()) for figure in figures.values()]
        is_reward = [score.mean for score in scores] == [figure.reward.mean for figure in figures.values()]
        if len(names) > 1 or not is_reward:
            yield name, " → ".join(score.counted for score in scores)
    best, last = summary.best_version, summary.last_version
    if best is not None:
        untrained = "" if best.number else ", the base model: no trained version has done better"
        yield "best version", f"v{best.number}{untrained or _location(best)}"
    if last is not None:
        base = "" if last.number else ", the base model: nothing was trained"
        yield "last version", f"v{last.number}{base or _location(last)}"
    if not summary.is_measured:
        of = "" if last is None else f" of v{last.number}"
        how = "" if validated else f": no validation of held-out examples ({VALIDATION_KEY}) was run"
        yield "not measured", f"nothing was measured after the last update{of}{how}"


def _location(version: ModelVersion) -> str:
    """Return the backend's name for a version; empty if its weights are in the run folder."""
    is_here = "checkpoints" in Path(version.location).parts or not version.number
    return "" if is_here else f"  {version.location}"
