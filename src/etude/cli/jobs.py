"""`etude jobs RUN`: the training jobs of a run."""

from __future__ import annotations

from etude.cli import after, hints
from etude.cli.console import emit, next_step, say, table
from etude.cli.options import RUNS, AsJson, OutputDir, Run


def jobs(run: Run, output_dir: OutputDir = RUNS, as_json: AsJson = False) -> None:
    """List the training jobs of a run with their status."""
    from etude.store.facts import find_run
    from etude.store.log import INTERRUPTED, jobs_of

    path = find_run(run, output_dir)
    found = jobs_of(path)
    if as_json:
        emit([job.model_dump(mode="json") for job in found])
        return
    if not found:
        say(f"run {path.name} has submitted no training job yet")
    else:
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
            for job in found
        ]
        columns = ("epoch", "job", "backend", "status", "trajectories", "seconds", "version", "message")
        table(columns, rows, sentences=("message",))
    stopped = bool(found) and found[-1].status == INTERRUPTED
    next_step(after.after_run(path) if stopped or not found else hints.show(path))
