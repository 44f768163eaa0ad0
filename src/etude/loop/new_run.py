"""A new run folder for a config, that is gone again when the request turns out to be wrong."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from etude.config.load import resolved_yaml
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.store.run_folder import RunFolder, new_run_name
from etude.store.stored_config import EvaluationRequest, write_request


@contextmanager
def new_run(
    config: Config, name: str | None = None, request: EvaluationRequest | None = None
) -> Iterator[RunFolder]:
    """An open run folder in the config's output folder; with `request` it is one of an evaluation.

    When the block raises RequestError and nothing was journalled, the folder is deleted: it would only
    be in the way of the next try. Raises RequestError when the run exists, StoreError when its folder
    cannot be made.
    """
    root = config.finetuning.output_dir.absolute()
    if name is None and request is not None:
        name = f"evaluation-{new_run_name(root)}"
    yaml, seed = resolved_yaml(config), config.finetuning.seed
    with RunFolder.create(root, name, config_yaml=yaml, seed=seed) as run:
        if request is not None:
            write_request(run.path, request)
        try:
            yield run
        except RequestError:
            if next(run.journal.scan(), None) is None:
                shutil.rmtree(run.path, ignore_errors=True)
            raise
