"""`etude train CONFIG` and `etude resume [RUN]`: train, and continue a stopped run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from etude.cli import hints
from etude.cli.command import (
    RUNS,
    AsJson,
    ConfigFile,
    OnCluster,
    OutputDir,
    Overrides,
    argument,
    on_cluster,
    on_error,
    option,
    run_async,
    run_configuration,
)
from etude.cli.console import emit, next_step, say, say_wrapped, show_outcome, shown_path

if TYPE_CHECKING:
    from etude.config.schema import Config
    from etude.store.run_folder import RunFolder
from etude.cli.evaluate import evaluate_and_show


def train(
    config: ConfigFile,
    override: Overrides = None,
    name: Annotated[str | None, option("Name of the run; chosen by default.")] = None,
    dataset: Annotated[Path | None, option("Train on this file in place of eval.general.dataset.")] = None,
    validation_dataset: Annotated[Path | None, option("Validate on this file of held-out examples.")] = None,
    validation_interval: Annotated[
        int | None, option("Epochs from one validation to the next.", min=1)
    ] = None,
    on: OnCluster = None,
    as_json: AsJson = False,
) -> None:
    """Train the model of an agent as a config says.

    Ctrl-C stops the run at any time, and `etude resume` continues it.
    """
    from etude.config.load import load_config
    from etude.loop.lifecycle import new_run

    overrides = run_configuration(
        dataset=dataset, validation_dataset=validation_dataset, validation_interval=validation_interval
    )
    overrides += on_cluster(on)
    settings = load_config(config, [*(override or ()), *overrides])
    with new_run(settings, name) as run:
        train_and_show(settings, run, as_json=as_json)


def train_and_show(settings: Config, run: RunFolder, *, as_json: bool) -> None:
    """Train in an open run folder, and show the progress and the outcome."""
    from etude.show.progress import progress_for
    from etude.verbs import train_in as train_run

    with on_error(lambda: hints.after_stop(run.path)), progress_for(json=as_json) as progress:
        summary = run_async(train_run(settings, run, progress=progress)).facts.summary
    if not as_json:
        skipped = f", {summary.epochs_skipped} skipped" if summary.epochs_skipped else ""
        say()
        show_outcome(summary, f"{summary.epochs_trained} trained{skipped}", run.path)
        say(f"run             {shown_path(run.path)}")
        next_step(hints.after_training(run.path))


def resume(
    run: Annotated[
        str | None,
        argument(
            "A run folder, a run's name, or the address of its backup, as s3://bucket/etude/RUN; by default "
            "the latest unfinished run."
        ),
    ] = None,
    retry_failed: Annotated[
        bool,
        option(
            "In epochs that are not finished, retry failures that were not the agent's: models that did "
            "not answer, evaluators that gave no score.",
            "--retry-failed",
        ),
    ] = False,
    override: Overrides = None,
    on: OnCluster = None,
    output_dir: OutputDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Resume a stopped run, without repeating any finished work.

    `-o` may change `finetuning.num_epochs`, to train for longer, the error budget, time limits, concurrency
    and the cluster (`-o cluster=null` for none). It also gives secrets, which run folders do not keep. From
    an address, the run's folder is restored into --output-dir. Give options of the storage's driver as
    `-o storage.options.NAME=VALUE`.
    """
    from etude.loop.arguments import require_objects
    from etude.loop.lifecycle import config_to_resume, note_changes
    from etude.store.facts import find_run, latest_unfinished
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import read_request

    changes = [*(override or ()), *on_cluster(on)]
    if run is not None and "://" in run:
        path = _restore_run(run, output_dir, changes, as_json)
    else:
        path = find_run(run, output_dir) if run is not None else latest_unfinished(output_dir)
    with RunFolder.open(path) as folder:  # This verifies the journal, from which the config is read.
        request, settings = read_request(folder.journal), config_to_resume(path, changes)
        require_objects(settings, folder.path)
        changed = run_async(note_changes(folder, settings))
        if not as_json:
            if run is None:
                say(f"resuming {path.name}")
            for key, (before, after) in changed.items():
                say_wrapped(f"{key}: {_show_setting(before)} → {_show_setting(after)}")
        if retry_failed and not _mark_failures_for_retry(folder, as_json):
            return
        if request is None:
            train_and_show(settings, folder, as_json=as_json)
            return
        evaluate_and_show(settings, folder, request, as_json=as_json)


def _show_setting(value: Any) -> Any:
    """Return a setting for display: a block becomes a list of its keys and values."""
    if not isinstance(value, dict):
        return value
    return ", ".join(f"{key} {item}" for key, item in value.items() if item is not None) or "none"


def _restore_run(address: str, output_dir: Path, changes: list[str], as_json: bool) -> Path:
    """Restore a run's folder from its backup and print the result. Extends `changes` for the backup."""
    from etude.loop.lifecycle import storage_options, storage_overrides
    from etude.store.backup import restore_run

    restored = restore_run(address, output_dir, storage_options(changes))
    changes += storage_overrides(restored.run, address)
    if as_json:
        emit({"event": "restored", **asdict(restored)})
    else:
        say_wrapped(str(restored))
    return restored.run


def _mark_failures_for_retry(folder: RunFolder, as_json: bool) -> bool:
    """Mark failures to be tried again and print their counts. Return False if the run is finished."""
    from etude.loop.lifecycle import retry_failed

    forgotten = run_async(retry_failed(folder))
    if as_json:
        emit({"event": "retry_failed", "finished": forgotten is None, "forgotten": dict(forgotten or {})})
    elif forgotten is None:
        say(f"nothing to retry: run {folder.name} is finished, with all its epochs")
    else:
        counts = ", ".join(f"{count} × {kind}" for kind, count in forgotten.most_common())
        say(f"to be retried: {counts or 'nothing'}")
    return forgotten is not None
