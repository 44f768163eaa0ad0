"""The run folder of a `nat finetune`, a new one or an unfinished one, and its progress as log records."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from etude.config.load import resolved_yaml
from etude.config.schema import Config
from etude.loop.lifecycle import new_run, note_changes, without_changeable
from etude.report.lines import LineProgress
from etude.store.facts import facts_of, list_runs
from etude.store.run_folder import RunFolder
from etude.store.stored_config import CONFIG, stored_data


@contextmanager
def run_of(config: Config) -> Iterator[RunFolder]:
    """The open folder of the latest unfinished run of this config, or of a new one.

    How the run is carried out may differ, and its number of epochs. Raises StoreError when the folder cannot
    be written.
    """
    unfinished = unfinished_run(config)
    with new_run(config) if unfinished is None else RunFolder.open(unfinished) as run:
        if unfinished is not None:
            note_changes(run, config)
        yield run


def unfinished_run(config: Config) -> Path | None:
    """The run of this config that was changed last and is neither finished nor in use."""
    wanted = without_changeable(yaml.safe_load(resolved_yaml(config)), config)
    for run in list_runs(config.finetuning.output_dir):
        is_its = (run / CONFIG).is_file() and without_changeable(stored_data(run), config) == wanted
        if is_its and facts_of(run).state == "unfinished":
            return run
    return None


logger = logging.getLogger("etude.integrations.nat")


class LogStream(io.StringIO):
    """A text stream whose lines become log records."""

    def write(self, text: str) -> int:
        """Log the lines of a text; what ends a line is not one."""
        for line in text.splitlines():
            if line.strip():
                logger.info("%s", line)
        return len(text)


def logged_progress() -> LineProgress:
    """Plain lines, as log records of the level INFO."""
    return LineProgress(LogStream())
