"""`etude runs list|show|compare`: what there is, and what came of it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli import after, hints
from etude.cli.console import emit, next_step, path_shown, say, say_wrapped, table
from etude.cli.errors import reported
from etude.cli.options import RUNS, AsJson, OutputDir, Run
from etude.cli.tables import said_once

if TYPE_CHECKING:
    from etude.core.history import History
    from etude.stored.facts import RunFacts

app = typer.Typer(help="List, show and compare runs.", no_args_is_help=True, rich_markup_mode=None)


@app.command("list")
@reported
def list_(output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """List the runs in a folder, the latest first."""
    from etude.store.run_list import list_runs
    from etude.stored.facts import facts_of

    there = list_runs(output_dir)
    facts = [facts_of(run.path) for run in there]
    if as_json:
        emit([one.as_json() for one in facts])
        return
    if not facts:
        say(f"there are no runs in {output_dir}")
        next_step(after.at_the_start())
        return
    rows = [
        (one.name, one.kind, _state(one), _epochs(one), *_ends(one), _when(run.changed))
        for one, run in zip(facts, there, strict=True)
    ]
    table(("run", "kind", "state", "epochs", "before", "after", "changed"), rows)
    readable = next((one.path for one in facts if one.state != "unreadable"), None)
    next_step(hints.check_installation(output_dir) if readable is None else hints.show(readable))


@app.command()
@reported
def show(run: Run, output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """Show a run: its facts, epochs and validations."""
    from etude.stored.facts import facts_of, histories_of
    from etude.stored.find import find_run

    path = find_run(run, output_dir)
    histories = histories_of(path)
    facts = facts_of(path)
    if as_json:
        told = {name: history.model_dump(mode="json") for name, history in histories.items()}
        emit({**facts.as_json(), **({"history": told[None]} if None in told else {"histories": told})})
        return
    _show_facts(facts)
    for name, history in histories.items():
        _show_history(name, history)
    next_step(after.after_run(path))


@app.command()
@reported
def compare(
    runs: Annotated[list[str], typer.Argument(help="Two runs or more.", show_default=False)],
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Put runs side by side: settings that differ, rewards, and the difference with its interval."""
    from etude.core.errors import RequestError
    from etude.stored.comparison import differing_settings, paired_difference
    from etude.stored.facts import facts_of, histories_of
    from etude.stored.find import find_run

    if len(runs) < 2:
        raise RequestError("name two runs or more: etude runs compare RUN RUN")
    paths = [find_run(run, output_dir) for run in runs]
    for path in paths:
        histories_of(path)  # What cannot be read is an error here.
    facts, settings = [facts_of(path) for path in paths], differing_settings(paths)
    differences = [paired_difference(paths[0], path) for path in paths[1:]]
    if as_json:
        told = [
            None if one is None else {"mean": one.mean, "low": one.low, "high": one.high, "n": one.n}
            for one in differences
        ]
        emit({"runs": [one.as_json() for one in facts], "settings": settings, "differences": told})
        return
    rows: list[tuple[Any, ...]] = [
        ("state", *map(_state, facts)),
        ("epochs", *map(_epochs, facts)),
        ("before", *(_ends(one)[0] for one in facts)),
        ("after", *(_ends(one)[1] for one in facts)),
    ]
    rows += [(key, *(_setting(value) for value in values)) for key, values in settings.items()]
    table(("", *(one.name for one in facts)), rows)
    for one, difference in zip(facts[1:], differences, strict=True):
        if difference is None:
            say_wrapped(f"{one.name}: measured on no examples that {facts[0].name} was measured on")
        else:
            better = f"{difference.mean:+.3f} [{difference.low:+.3f}, {difference.high:+.3f}]"
            say_wrapped(f"{one.name} against {facts[0].name}: {better} on {difference.n} common examples")
    next_step(hints.show(paths[-1]))


def _show_facts(facts: RunFacts) -> None:
    say(f"run             {path_shown(facts.path)}")
    say(f"state           {_state(facts)}")
    for label, value in (("base model", facts.base), ("method", facts.method), ("backend", facts.backend)):
        if value is not None:
            say(f"{label:<15} {value}")
    if facts.kind == "evaluate":
        for name, scores in ((facts.result or {}).get("scores") or {}).items():
            say(f"{name:<15} {_interval(scores['mean'], scores['low'], scores['high'])}  n={scores['n']}")
        return
    say(f"epochs          {_epochs(facts)}")
    for name, summary in (facts.summary.get("targets") or {None: facts.summary}).items():
        _show_summary(name, summary)
    plot = facts.path / "reward_plot.png"
    if plot.exists():
        say(f"plot            {path_shown(plot)}")


def _show_summary(target: str | None, summary: Mapping[str, Any]) -> None:
    if target is not None:
        say(f"target          {target}")
    before, after = (_reward(summary.get(key)) for key in ("before", "after"))
    say(f"before          {before or '–'}  ({summary.get('measured_on')})")
    say(f"after           {after or '–'}")
    for key in ("best_version", "last_version"):
        version = summary.get(key)
        if version:
            say(f"{key.replace('_', ' '):<15} v{version['number']}  {version['location']}")


def _show_history(target: str | None, history: History) -> None:
    from etude.epochs.metrics import drift_of

    validations = {entry.epoch: entry.metrics for entry in history.validations}
    reasons = said_once([entry.skipped or entry.resting for entry in history.epochs])
    rows = [
        (
            entry.epoch + 1,
            entry.metrics.get("avg_reward"),
            entry.metrics.get("episodes"),
            sum((entry.metrics.get("failures") or {}).values()),
            entry.metrics.get("filtered_trajectories"),
            None if entry.version is None else f"v{entry.version.number}",
            (validations.get(entry.epoch + 1) or {}).get("avg_reward"),
            reason,
        )
        for entry, reason in zip(history.epochs, reasons, strict=True)
    ]
    if rows:
        columns = ("epoch", "reward", "episodes", "failed", "trained on", "version", "validation", "skipped")
        table(columns, rows, title=target, sentences=("skipped",))
    for fault, count in drift_of(history).most_common():
        say_wrapped(f"drift           {count} branches, {fault} (see `etude doctor --drift MODEL`)")


def _state(facts: RunFacts) -> str:
    if facts.in_use_by is not None:
        return f"running (process {facts.in_use_by})"
    if facts.problem is not None:
        return f"unreadable: {facts.problem}"
    is_empty = facts.kind == "train" and facts.state == "finished" and not facts.summary.get("epochs_trained")
    return "finished, trained on nothing" if is_empty else facts.state


def _epochs(facts: RunFacts) -> str | None:
    if facts.kind == "evaluate" or facts.state == "unreadable":
        return None
    return f"{facts.epochs_done}/{facts.num_epochs or '?'}"


def _ends(facts: RunFacts) -> tuple[str | None, str | None]:
    """The reward before and after; of an evaluation only after."""
    if facts.kind == "evaluate":
        result = facts.result or {}
        scores = (result.get("scores") or {}).get(result.get("reward")) or {}
        return None, _interval(scores.get("mean"), scores.get("low"), scores.get("high"))
    targets = facts.summary.get("targets")
    if not targets:
        return _reward(facts.summary.get("before")), _reward(facts.summary.get("after"))
    before, after = (
        ", ".join(f"{name} {_mean(summary.get(key))}" for name, summary in targets.items())
        for key in ("before", "after")
    )
    return before, after


def _mean(end: Mapping[str, Any] | None) -> str:
    reward = (end or {}).get("avg_reward")
    return "–" if reward is None else f"{reward:.3f}"


def _reward(end: Mapping[str, Any] | None) -> str | None:
    end = end or {}
    return _interval(end.get("avg_reward"), end.get("reward_low"), end.get("reward_high"))


def _interval(mean: float | None, low: float | None, high: float | None) -> str | None:
    if mean is None:
        return None
    return f"{mean:.3f}" if low is None or high is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def _setting(value: Any) -> str:
    return "–" if value is None else str(value)


def _when(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
