"""`etude train CONFIG`: collect, train, and again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from etude.cli import hints
from etude.cli.command import AsJson, ConfigFile, Overrides, run_async, then
from etude.cli.console import next_step, path_shown, say
from etude.cli.figures import show_outcome

if TYPE_CHECKING:
    from etude.config.schema import Config
    from etude.store.run_folder import RunFolder


def train(
    config: ConfigFile,
    override: Overrides = None,
    name: Annotated[str | None, typer.Option(help="Name of the run; made up by default.")] = None,
    dataset: Annotated[
        Path | None, typer.Option(help="Train on this file in place of eval.general.dataset.")
    ] = None,
    validation_dataset: Annotated[
        Path | None, typer.Option(help="Validate on this file of held-out examples.")
    ] = None,
    validation_interval: Annotated[
        int | None, typer.Option(min=1, help="Epochs from one validation to the next.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train the model of an agent as a config says.

    Ctrl-C stops it at any time, and `etude resume` goes on.
    """
    from etude.config.load import load_config
    from etude.loop.lifecycle import new_run

    overrides = run_configuration(
        dataset=dataset, validation_dataset=validation_dataset, validation_interval=validation_interval
    )
    settings = load_config(config, [*(override or ()), *overrides])
    with new_run(settings, name) as run:
        train_in(settings, run, as_json=as_json)


def run_configuration(**settings: Any) -> list[str]:
    """Overrides of keys in `finetuning.run_configuration`, for those that are given.

    Files are looked for in the current folder first, as everything that is typed on a command line.
    """
    import json

    overrides = []
    for key, value in settings.items():
        if isinstance(value, Path):
            value = str(value.absolute() if value.exists() else value)
        if value is not None:
            text = json.dumps(value, ensure_ascii=False)
            overrides.append(f"finetuning.run_configuration.{key}={text}")
    return overrides


def train_in(settings: Config, run: RunFolder, *, as_json: bool) -> None:
    """Train in an open run folder, and show how it goes and what came of it."""
    from etude.report.live import progress_for
    from etude.verbs import train_in as train_run

    with then(lambda: hints.after_stop(run.path)), progress_for(json=as_json) as progress:
        summary = run_async(train_run(settings, run, progress=progress)).summary
    if not as_json:
        skipped = f", {summary['epochs_skipped']} skipped" if summary["epochs_skipped"] else ""
        say()
        show_outcome(summary, f"{summary['epochs_trained']} trained{skipped}", run.path)
        say(f"run             {path_shown(run.path)}")
        next_step(hints.after_training(run.path))
