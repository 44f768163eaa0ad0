"""`etude runs list|show|check|compare`, `jobs RUN`, `view` and `cluster status RUN`: look at runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Run, argument, on_error, option, report_errors
from etude.cli.console import (
    emit,
    next_step,
    say,
    say_fact,
    say_wrapped,
    show_bill,
    show_outcome,
    show_troubles,
    shown_path,
    table,
)
from etude.core.errors import RequestError, StoreError

if TYPE_CHECKING:
    from etude.core.history import Entry, History
    from etude.store.facts import RunFacts
    from etude.store.histories import JobFacts
    from etude.store.status import RunStatus

app = typer.Typer(help="List, show and compare runs.", no_args_is_help=True, rich_markup_mode=None)
cluster_app = typer.Typer(
    help="Look at a run on several machines.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("list")
@report_errors
def list_(output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """List the runs in a folder, the latest first."""
    from etude.store.facts import list_runs, read_facts

    facts = [read_facts(run) for run in list_runs(output_dir)]
    if as_json:
        emit([run_facts.as_json() for run_facts in facts])
        return
    if not facts:
        say(f"there are no runs in {output_dir}")
        next_step(hints.new_project())
        return
    rows = [
        (
            *(each.name, each.kind, each.shown_state, each.shown_epochs, *each.first_and_last_reward),
            f"{datetime.fromtimestamp(each.changed):%Y-%m-%d %H:%M}",
        )
        for each in facts
    ]
    table(("run", "kind", "state", "epochs", "first reward", "last reward", "changed"), rows)
    readable = next((run_facts.path for run_facts in facts if run_facts.state != "unreadable"), None)
    next_step(hints.command("doctor") if readable is None else hints.show(readable))


@app.command()
@report_errors
def show(run: Run, output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """Show a run: its facts, epochs and validations, and its bill."""
    from etude.engines.ledger import read_bill
    from etude.store.facts import find_run, read_facts

    path = find_run(run, output_dir)
    facts, bill = read_facts(path, required=True), read_bill(path)
    if as_json:
        stored = {name: history.model_dump(mode="json") for name, history in facts.histories.items()}
        epochs = {"history": stored[None]} if None in stored else {"histories": stored}
        emit({**facts.as_json(), **epochs, "bill": bill.as_json()})
        return
    _show_facts(facts)
    for name, history in facts.histories.items():
        _show_history(name, history, path)
    show_bill(bill)
    next_step(hints.after_run(path, facts))


@app.command()
@report_errors
def check(run: Run, output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """Verify the stored files of a run. The exit code is 1 if it is damaged."""
    from etude.loop.lifecycle import check_files, check_journal
    from etude.store.database import TO_MEND
    from etude.store.facts import find_run, read_facts

    path = find_run(run, output_dir)
    damage = check_journal(path)
    # The journal lists the versions that must exist.
    files = [] if damage else check_files(path)
    if not damage and not files and (problem := read_facts(path).problem) is not None:
        files.append(problem)
    if as_json:
        emit({"run": str(path), "damage": damage, "files": files})
        raise typer.Exit(1 if damage or files else 0)
    if damage:
        raise StoreError(f"{path} is damaged: {'; '.join(damage)}; {TO_MEND}")
    if files:
        with on_error(lambda: hints.command("resume", path)):
            raise StoreError(
                f"{path} is damaged: {'; '.join(files)}. The last version is made again when the run is "
                "resumed, an earlier one when it is exported"
            )
    say("its journal is whole: every entry is as it was written, and none is missing")
    say("its versions are whole: every file is as it was written")
    next_step(hints.after_run(path))


@app.command()
@report_errors
def compare(
    runs: Annotated[list[str], argument("Two runs or more.")],
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Compare runs: settings that differ, rewards, and the difference of each score with its interval."""
    from etude.core.stats import shown_mean
    from etude.store.facts import differing_settings, find_run, paired_differences, read_facts

    if len(runs) < 2:
        raise RequestError("name two or more runs: etude runs compare RUN RUN")
    paths = [find_run(run, output_dir) for run in runs]
    facts = [read_facts(path, required=True) for path in paths]
    settings = differing_settings(paths)
    differences = [paired_differences(paths[0], path) for path in paths[1:]]
    if as_json:
        by_name = [{name: asdict(each) for name, each in own.items()} for own in differences]
        runs_json = [run_facts.as_json() for run_facts in facts]
        emit({"runs": runs_json, "settings": settings, "differences": by_name})
        return
    columns = [(each.shown_state, each.shown_epochs, *each.first_and_last_reward) for each in facts]
    labels = ("state", "epochs", "first reward", "last reward")
    rows: list[tuple[Any, ...]] = [*zip(labels, *columns, strict=True)]
    rows += [
        (key, *("–" if value is None else str(value) for value in values)) for key, values in settings.items()
    ]
    table(("", *(run_facts.name for run_facts in facts)), rows)
    first = facts[0].name
    for run_facts, by_evaluator in zip(facts[1:], differences, strict=True):
        if not by_evaluator:
            say_wrapped(f"{run_facts.name}: measured on fewer than two examples that {first} was measured on")
        for name, difference in by_evaluator.items():
            mean = shown_mean(difference.mean, difference.low, difference.high, sign="+")
            say_wrapped(f"{run_facts.name} against {first}, {name}: {mean} on {difference.n} common examples")
    next_step(hints.show(paths[-1]))


def jobs(run: Run, output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """List the training jobs of a run with their status."""
    from etude.store.facts import find_run
    from etude.store.histories import INTERRUPTED, read_jobs

    path = find_run(run, output_dir)
    submitted = read_jobs(path)
    if as_json:
        emit([job.model_dump(mode="json") for job in submitted])
        return
    if not submitted:
        say(f"run {path.name} has submitted no training job yet")
        next_step(hints.after_run(path))
        return
    rows = [
        (
            job.epoch,
            job.name if job.target is None else f"{job.name} ({job.target})",
            job.backend,
            job.status,
            job.trajectories,
            None if job.seconds is None else f"{job.seconds:.1f}",
            None if job.version is None else f"v{job.version}",
            job.message,
        )
        for job in submitted
    ]
    table(("epoch", "job", "backend", "status", "trajectories", "seconds", "version", "message"), rows)
    next_step(hints.after_run(path) if submitted[-1].status == INTERRUPTED else hints.show(path))


def view(
    run: Annotated[
        str | None, argument("A run folder, or a run's name in --output-dir; by default all of them.")
    ] = None,
    output_dir: OutputDir = RUNS,
    port: Annotated[
        int | None, option("The port; by default 7331, or a free one if that is taken.", min=0, max=65535)
    ] = None,
) -> None:
    """Show runs, episodes and tokens in a browser, also while they are made. Ctrl-C stops it.

    Only this machine can reach the page, and only with the printed link. The page changes nothing.
    """
    from etude.store.facts import find_run
    from etude.view.app import serve_view

    path = None if run is None else find_run(run, output_dir)
    root = output_dir.absolute() if path is None else path.parent
    serve_view(
        root,
        lambda address, key: say(
            f"the runs in {shown_path(root)} are shown at\n\n  {address}?open={key}\n\nCtrl-C stops it."
        ),
        run=None if path is None else path.name,
        port=port,
    )


@cluster_app.callback()
def cluster() -> None:
    """Keep `status` a separate command, although it is the only one."""


@cluster_app.command()
@report_errors
def status(run: Run, output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """Show where the parts of a run are, how much work is left, and what the run waits for.

    Reads the run's folder, with or without a cluster, also while the run is active.
    """
    from etude.store.facts import find_run
    from etude.store.histories import read_jobs
    from etude.store.status import run_status

    path = find_run(run, output_dir)
    seen = run_status(path)
    jobs = [job for job in read_jobs(path) if job.status in ("pending", "running")]
    if as_json:
        status = None if seen.status is None else seen.status.model_dump(mode="json")
        facts = {"state": seen.state, "pid": seen.pid, "age": seen.age, "status": status}
        emit({"run": str(path), **facts, "jobs": [job.model_dump(mode="json") for job in jobs]})
        return
    say_fact("run", shown_path(path))
    reported, age = seen.status, _since(seen.age or 0.0)
    if seen.state == "starting":
        say_fact("head", f"process {seen.pid} has just started, and has not reported yet")
    elif reported is None:
        say_fact("head", f"no process has the run {path.name} open")
    elif seen.state == "lost":
        say_fact("head", f"gone: process {reported.pid} on {reported.host}; its last report is {age} old")
    else:
        up = _since(max(0.0, reported.at - reported.since))
        say_fact("head", f"process {reported.pid} on {reported.host}, since {up}")
        if seen.state == "silent":
            say_fact("warning", f"the head has not reported for {age}: it is stuck, or its code blocks")
    if reported is not None:
        _show_status(reported, jobs)
    next_step(hints.after_run(path))


def _show_facts(facts: RunFacts) -> None:
    from etude.core.evaluation import FailureCause
    from etude.core.history import Score
    from etude.store.facts import imported_lines

    say_fact("run", shown_path(facts.path))
    say_fact("state", facts.shown_state)
    trained = (("base model", facts.base), ("method", facts.method), ("backend", facts.backend))
    for label, value in (("model", facts.model),) if facts.kind == "evaluate" else trained:
        if value is not None:
            say_fact(label, value)
    if facts.storage is not None:
        at, fault = (facts.storage.get(key) for key in ("copied_at", "last_error"))
        since = "never" if at is None else f"{datetime.fromtimestamp(at):%Y-%m-%d %H:%M:%S}"
        text = f"{facts.storage['address']}, last backed up: {since}"
        text += f"; it fails now: {fault}" if fault else ""
        say_fact("storage", text)
    if facts.state == "unreadable":
        return
    if facts.kind == "train":
        show_outcome(facts.summary, str(facts.shown_epochs), facts.path)
        return
    result = facts.result or {}
    if facts.kind == "import":
        for label, text in imported_lines(result):
            say_fact(label, text)
        return
    for name, scores in (result.get("scores") or {}).items():
        examples = "" if scores["n"] == scores["scored"] else f" examples, {scores['scored']} scores"
        say_fact(name, f"{Score.model_validate(scores).with_count}{examples}")
    causes = [FailureCause.model_validate(cause) for cause in result.get("causes") or ()]
    show_troubles(facts.path, result.get("model_calls") or {}, causes)


def _show_history(target: str | None, history: History, run: Path) -> None:
    from etude.store.facts import describe_kept
    from etude.store.figures import causes_in, failed_counts

    validations = {entry.epoch: entry.metrics for entry in history.validations}
    reasons = [entry.skipped or entry.resting for entry in history.epochs]
    rows = [
        (
            entry.epoch,
            entry.metrics.get("avg_reward"),
            entry.metrics.get("episodes"),
            failed_counts(entry.metrics)[0],
            f"{100 * share:.1f} %" if (share := entry.metrics.get("cut_off_share")) else None,
            entry.metrics.get("filtered_trajectories"),
            None if entry.version is None else f"v{entry.version.number}",
            (validations.get(entry.epoch) or {}).get("avg_reward"),
            "as before" if reason is not None and reason == before else reason,
        )
        for entry, before, reason in zip(history.epochs, [None, *reasons], reasons, strict=False)
    ]
    if rows:
        counts = ("episodes", "failed", "cut off", "trained on")
        table(("epoch", "reward", *counts, "version", "validation", "skipped"), rows, title=target)
    if (kept := describe_kept(run, history)) is not None:
        say_fact("on the disk", kept)
    for recovery in history.recoveries:
        say_fact("recovered", f"{recovery.timestamp}: {recovery}")
    drift = sum((Counter(entry.metrics.get("drift") or {}) for entry in history.epochs), Counter[str]())
    for fault, count in drift.most_common():
        say_fact("drift", f"{count} branches, {fault}")
    entries: list[Entry] = [*history.validations, *history.epochs]
    calls = Counter[str]()
    for entry in entries:
        calls.update(entry.metrics.get("calls") or {})
    # Cut-off answers are left out here: the entries' own warnings name them.
    show_troubles(run, {**calls, "cut_off": 0}, causes_in(entries))


def _show_status(status: RunStatus, jobs: list[JobFacts]) -> None:
    epoch = "" if status.epoch is None else f", epoch {status.epoch}/{status.num_epochs}"
    say_fact("phase", f"{status.phase}{epoch}, since {_since(status.phase_seconds)}")
    out_of = "" if status.expected is None else f" of {status.expected}"
    waiting = "" if status.waiting is None else f", {status.waiting} waiting"
    failed = f"; {status.totals.failed} failed so far" if status.totals.failed else ""
    say_fact("episodes", f"{status.finished}{out_of} finished, {status.playing} playing{waiting}{failed}")
    for job in jobs:
        say_fact("job", f"{job.name} at {job.backend}: {job.status}")
    for team in status.learners:
        nodes = ", ".join(f"{count} on {node}" for node, count in Counter(team.nodes).items())
        say_fact("learners", f"{nodes or 'none has room yet'}; {team.wanted} were asked for")
    waiting = f", {status.journal.waiting} not on the disk yet" if status.journal.waiting else ""
    say_fact("journal", f"{status.journal.committed} entries written{waiting}")
    for wait in status.waits:
        say_fact("waits for", f"{wait.what}, {_since(wait.seconds)}")
    if status.runners:
        runners = [
            (each.number, each.node or None, each.state, _since(each.seconds), each.episodes)
            for each in status.runners
        ]
        table(("runner", "node", "state", "since", "episodes"), runners)
    models = [
        (model.name, f"v{model.version}", model.waiting, _since(model.oldest)) for model in status.models
    ]
    table(("model", "version", "calls in flight", "oldest"), models)


def _since(seconds: float | None) -> str | None:
    from etude.core.stats import shown_seconds  # Imported here because `etude --help` does not need it.

    return None if seconds is None else shown_seconds(seconds)
