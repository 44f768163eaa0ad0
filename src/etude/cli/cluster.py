"""`etude cluster status RUN`: where a run's parts are, how busy they are, and their waits."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Run, report_errors
from etude.cli.console import emit, next_step, say, say_wrapped, shown_path, table

if TYPE_CHECKING:
    from etude.store.log import JobFacts
    from etude.store.status import RunStatus, SeenStatus

app = typer.Typer(help="Look at a run on several machines.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def cluster() -> None:
    """Keep `status` a separate command, although it is the only one."""


@app.command()
@report_errors
def status(run: Run, output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """Show where the parts of a run are, how much work is left, and what the run waits for.

    Reads the run's folder, with or without a cluster, also while the run is active.
    """
    from etude.store.facts import find_run
    from etude.store.log import read_jobs
    from etude.store.status import run_status

    path = find_run(run, output_dir)
    seen = run_status(path)
    jobs = [job for job in read_jobs(path) if job.status in ("pending", "running")]
    if as_json:
        status = None if seen.status is None else seen.status.model_dump(mode="json")
        facts = {"state": seen.state, "pid": seen.pid, "age": seen.age, "status": status}
        emit({"run": str(path), **facts, "jobs": [job.model_dump(mode="json") for job in jobs]})
        return
    say(f"run             {shown_path(path)}")
    _say_liveness(seen, path)
    if seen.status is not None:
        _show(seen.status, jobs)
    next_step(hints.after_run(path))


def _say_liveness(seen: SeenStatus, path: Path) -> None:
    """Say whether the head process runs, and how old its last status is."""
    status, age = seen.status, _since(seen.age or 0.0)
    if seen.state == "starting":
        say(f"head            process {seen.pid} has just started, and has not reported yet")
    elif status is None:
        say(f"head            no process has the run {path.name} open")
    elif seen.state == "lost":
        say(f"head            gone: process {status.pid} on {status.host}; its last report is {age} old")
    else:
        up = _since(max(0.0, status.at - status.since))
        say(f"head            process {status.pid} on {status.host}, since {up}")
        if seen.state == "silent":
            say(f"warning         the head has not reported for {age}: it is stuck, or its code blocks")


def _show(status: RunStatus, jobs: list[JobFacts]) -> None:
    epoch = "" if status.epoch is None else f", epoch {status.epoch}/{status.num_epochs}"
    say(f"phase           {status.phase}{epoch}, since {_since(status.phase_seconds)}")
    of = "" if status.expected is None else f" of {status.expected}"
    waiting = "" if status.waiting is None else f", {status.waiting} waiting"
    failed = f"; {status.totals.failed} failed so far" if status.totals.failed else ""
    say(f"episodes        {status.finished}{of} finished, {status.playing} playing{waiting}{failed}")
    for job in jobs:
        say(f"job             {job.name} at {job.backend}: {job.status}")
    for team in status.learners:
        nodes = ", ".join(f"{count} on {node}" for node, count in Counter(team.nodes).items())
        say(f"learners        {nodes or 'none has room yet'}; {team.wanted} were asked for")
    waiting = f", {status.journal.waiting} not on the disk yet" if status.journal.waiting else ""
    say(f"journal         {status.journal.committed} entries written{waiting}")
    for wait in status.waits:
        say_wrapped(f"waits for       {wait.what}, {_since(wait.seconds)}")
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
