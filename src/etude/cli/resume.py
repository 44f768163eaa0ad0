"""`etude resume [RUN]`: go on with what was stopped."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from etude.cli.command import RUNS, AsJson, OutputDir, Overrides, run_async
from etude.cli.console import emit, say

if TYPE_CHECKING:
    from etude.store.run_folder import RunFolder


def resume(
    run: Annotated[
        str | None,
        typer.Argument(help="A run folder or a run's name; by default the latest unfinished run."),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="In epochs that are not finished, try again what failed without the agent's fault: models "
            "that did not answer, evaluators that gave no score.",
        ),
    ] = False,
    override: Overrides = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Go on with a run that was stopped, without repeating anything that it has done.

    `-o` may change how it goes on: `finetuning.num_epochs`, to train for longer, the error budget, time
    limits, concurrency, and secrets, which are not kept in run folders.
    """
    from etude.loop.lifecycle import config_to_resume, note_changes
    from etude.store.facts import find_run, latest_unfinished
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import read_request

    path = find_run(run, output_dir) if run is not None else latest_unfinished(output_dir)
    request = read_request(path)
    settings = config_to_resume(path, override or ())
    with RunFolder.open(path) as folder:
        changed = note_changes(folder, settings)
        if not as_json:
            if run is None:
                say(f"going on with {path.name}")
            for key, (before, after) in changed.items():
                say(f"{key}: {before} → {after}")
        if retry_failed and not _forgets_failures(folder, as_json):
            return
        if request is not None:
            from etude.cli.evaluate import evaluate_in

            evaluate_in(settings, folder, request, as_json=as_json, per_example=False)
        else:
            from etude.cli.train import train_in

            train_in(settings, folder, as_json=as_json)


def _forgets_failures(folder: RunFolder, as_json: bool) -> bool:
    """Have failures tried again, and say which; False when the run is over, and there is nothing to do."""
    from etude.loop.lifecycle import retry_failed

    forgotten = run_async(retry_failed(folder))
    if as_json:
        emit({"event": "retry_failed", "finished": forgotten is None, "forgotten": dict(forgotten or {})})
    elif forgotten is None:
        say(f"nothing to try again: run {folder.name} is finished, with all its epochs")
    elif not forgotten:
        say("nothing to try again: no failure but the agent's own in epochs that are not finished")
    else:
        say("to be tried again: " + ", ".join(f"{count} × {kind}" for kind, count in forgotten.most_common()))
    return forgotten is not None
