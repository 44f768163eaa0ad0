"""A run in words: its state, how far it is, what was measured before and after, and its versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from etude.core.distribution import Distribution
from etude.core.stats import shown_mean
from etude.store.figures import shown_figure, shown_reward, shown_score

if TYPE_CHECKING:
    from etude.store.facts import RunFacts

VALIDATION_KEY = "finetuning.run_configuration.validation_dataset"
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


def figure_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Labels and texts of one model's summary (`etude.store.figures.summary_of`): its rewards, the other
    evaluators, and its best and last version."""
    if (warm_up := summary.get("warm_up")) is not None:
        version = "" if warm_up["version"] is None else f": v{warm_up['version']}"
        value = "" if warm_up["loss"] is None else f", loss {warm_up['loss']:.3f}"
        if warm_up["avg_reward"] is not None:
            value = f", reward {shown_reward(warm_up)} n={warm_up['n']} (training examples)"
        yield "warm-up", f"{warm_up['steps']} steps of imitation{value}{version}"
    validated = summary["measured_on"] == "validation"
    keys = ("before", "warm", "after") if validated else ("first_epoch", "last_epoch")
    known = {key: summary[key] for key in keys if summary.get(key) is not None}
    figures = [*known.values()]
    for key, figure in known.items():
        when = f" {key}" if "before" in known or "warm" in known else ""
        yield f"reward{when}", f"{shown_figure(figure)}  ({figure['measured']})"
        if (found := Distribution.among(figure)) is not None:
            yield f"distribution{when}", f"{found}: {found.shown_bars()}"
    for name in evaluators_in(figures):
        yield name, " → ".join(shown_score(figure["evaluators"].get(name)) for figure in figures)
    best, last = summary["best_version"], summary["last_version"]
    if best is not None:
        untrained = "" if best["number"] else ", the base model: no trained version has done better"
        yield "best version", f"v{best['number']}{untrained or _location(best)}"
    if last is not None:
        base = "" if last["number"] else ", the base model: nothing was trained"
        yield "last version", f"v{last['number']}{base or _location(last)}"
    if not summary["is_measured"]:
        of = "" if last is None else f" of v{last['number']}"
        how = "" if validated else f": no validation of held-out examples ({VALIDATION_KEY}) was run"
        yield "not measured", f"nothing was measured after the last update{of}{how}"


def evaluators_in(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The evaluators of the figures; none where there is only the one that is the reward."""
    names = list(dict.fromkeys(name for figure in figures for name in figure["evaluators"]))
    rewards = [{"mean": figure["avg_reward"]} for figure in figures]
    only = [{"mean": score["mean"]} for figure in figures for score in figure["evaluators"].values()]
    return [] if len(names) == 1 and only == rewards else names


def _location(version: Mapping[str, Any]) -> str:
    """The name that a backend has for a version; nothing for one whose weights are in the run folder."""
    location = str(version["location"])
    return "" if "checkpoints" in Path(location).parts or not version["number"] else f"  {location}"
