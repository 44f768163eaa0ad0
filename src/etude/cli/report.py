"""`etude report RUN`: send unsent records to the trackers of a stored run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from etude.cli import hints
from etude.cli.command import RUNS, AsJson, OutputDir, Overrides, Run, on_error, option, run_async
from etude.cli.console import emit, next_step, say_wrapped
from etude.core.errors import EtudeError, RequestError

if TYPE_CHECKING:
    from etude.config.schema import Config
    from etude.core.interfaces import Progress
    from etude.store.run_folder import RunFolder


def report(
    run: Run,
    override: Overrides = None,
    wait: Annotated[float, option("The maximum seconds to wait for each tracker.", min=0)] = 600.0,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Send the records that a run's trackers do not have yet.

    `-o report=wandb` sends a whole run to a new tracker.
    """
    from etude.show.progress import progress_for
    from etude.show.tracker_threads import report_config
    from etude.store.facts import find_run
    from etude.store.run_folder import RunFolder

    path = find_run(run, output_dir)
    with (
        RunFolder.open(path) as folder,
        progress_for(json=as_json) as progress,
        on_error(lambda: hints.command("report", path, *(f"-o{each}" for each in override or ()))),
    ):
        config = report_config(folder, override or ())
        if not config.report:
            raise RequestError(
                f"run {path.name} has no trackers; name one, as in: etude report {run} -o report=tensorboard"
            )
        outcomes = run_async(_send(config, folder, progress, wait))
        behind = [each["tracker"] for each in outcomes if each["sent"] < each["records"]]
        if as_json:
            emit({"run": str(path), "trackers": outcomes})
        else:
            for each in outcomes:
                say_wrapped(f"{each['tracker']}: {each['sent']} of {each['records']} records have arrived")
        if behind:
            raise EtudeError(f"not all of the run has arrived: {', '.join(behind)}")
    if not as_json:
        next_step(hints.show(path))


async def _send(config: Config, run: RunFolder, progress: Progress, wait: float) -> list[dict[str, Any]]:
    from etude.show.tracker_threads import Reporting

    reporting = Reporting(config, run, progress, patience=wait)
    async with reporting:
        pass
    return reporting.outcomes
