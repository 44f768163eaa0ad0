"""The figures of a run as lines: what was measured before and after, and what is known of its versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.core.distribution import Distribution
from etude.store.figure_words import shown_figure, shown_reward, shown_score

_RATED = 5
"""Versions whose ratings are shown, the best."""
VALIDATION_KEY = "finetuning.run_configuration.validation_dataset"


def figure_lines(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Labels and texts of one model's summary (`etude.store.summary.summary_of`): its rewards, the other
    evaluators, and its best and last version."""
    if (warm_up := summary.get("warm_up")) is not None:
        yield "warm-up", _warm_up(warm_up)
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
    for name, figures in (summary.get("opponents") or {}).items():
        yield f"ratings, {name}", _ratings(figures)
    yield from _versions(summary, validated)


def evaluators_in(figures: Sequence[Mapping[str, Any]]) -> list[str]:
    """The evaluators of the figures; none where there is only the one that is the reward."""
    names = list(dict.fromkeys(name for figure in figures for name in figure["evaluators"]))
    rewards = [{"mean": figure["avg_reward"]} for figure in figures]
    only = [{"mean": score["mean"]} for figure in figures for score in figure["evaluators"].values()]
    return [] if len(names) == 1 and only == rewards else names


def _ratings(figures: Mapping[str, Any]) -> str:
    """The best and the last of the versions that played, by Elo."""
    ratings = sorted(figures["ratings"].items(), key=lambda pair: -pair[1])
    shown = ", ".join(f"v{number} {rating:+.0f}" for number, rating in ratings[:_RATED])
    more = f", … {len(ratings) - _RATED} more" if len(ratings) > _RATED else ""
    return f"{shown}{more}  (Elo; {figures['games']} games)"


def _warm_up(warm_up: Mapping[str, Any]) -> str:
    version = "" if warm_up["version"] is None else f": v{warm_up['version']}"
    value = "" if warm_up["loss"] is None else f", loss {warm_up['loss']:.3f}"
    if warm_up["avg_reward"] is not None:
        value = f", reward {shown_reward(warm_up)} n={warm_up['n']} (training examples)"
    return f"{warm_up['steps']} steps of imitation{value}{version}"


def _versions(summary: Mapping[str, Any], validated: bool) -> Iterator[tuple[str, str]]:
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


def _location(version: Mapping[str, Any]) -> str:
    """The name that a backend has for a version; nothing for one whose weights are in the run folder."""
    location = str(version["location"])
    return "" if "checkpoints" in Path(location).parts or not version["number"] else f"  {location}"
