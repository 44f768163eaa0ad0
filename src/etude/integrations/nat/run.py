"""The run folder of a `nat finetune`: a new one, or the one that the same command left unfinished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from etude.config.load import resolved_yaml
from etude.config.schema import Config
from etude.loop.lifecycle import new_run, note_changes, without_changeable
from etude.store.facts import facts_of
from etude.store.run_folder import RunFolder
from etude.store.run_list import list_runs
from etude.store.stored_config import CONFIG, stored_data


@contextmanager
def run_of(config: Config) -> Iterator[RunFolder]:
    """The open folder of the latest unfinished run of this config, or of a new one.

    How the run is carried out may differ, and its number of epochs. Raises StoreError when the folder cannot
    be written.
    """
    unfinished = unfinished_run(config)
    if unfinished is None:
        with new_run(config) as run:
            yield run
        return
    with RunFolder.open(unfinished) as run:
        note_changes(run, config)
        yield run


def unfinished_run(config: Config) -> Path | None:
    """The run of this config that was changed last and is neither finished nor in use."""
    wanted = without_changeable(yaml.safe_load(resolved_yaml(config)), config)
    for run in list_runs(config.finetuning.output_dir):
        is_its = (run.path / CONFIG).is_file() and without_changeable(stored_data(run.path), config) == wanted
        if is_its and facts_of(run.path).state == "unfinished":
            return run.path
    return None
