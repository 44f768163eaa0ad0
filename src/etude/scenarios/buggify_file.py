"""Buggifying from a data set to a file, in a folder beside it that a stopped run goes on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from etude.core.errors import DatasetError
from etude.core.interfaces import Engine
from etude.scenarios.buggify import Buggified, BuggifySettings, Row, buggify
from etude.scenarios.dataset_config import AppsConfig, ProgramsConfig
from etude.scenarios.problems import FILE_TYPES, read_problems
from etude.store.files import write_atomically
from etude.store.run_folder import DATABASE, RunFolder

OnProgress = Callable[[int, int, int], None]
"""Told after each problem: how many are done, how many there are, and how many have a wrong program."""


def work_folder(out: Path) -> Path:
    """The folder with everything that was paid for so far."""
    return out.with_name(f"{out.name}.work")


def programs_config(
    source: str, *, split: str | None = None, difficulty: str | None = None
) -> ProgramsConfig:
    """The data set that a file, or a name on the hub, stands for."""
    is_file = Path(source).suffix.lower() in FILE_TYPES
    place = {"file_path": source} if is_file else {"path": source}
    return AppsConfig.model_validate({**place, "split": split, "difficulty": difficulty})


async def buggify_file(
    config: ProgramsConfig,
    out: Path,
    engine: Engine,
    settings: BuggifySettings,
    *,
    limit: int | None = None,
    max_concurrency: int = 8,
    on_progress: OnProgress | None = None,
) -> Buggified:
    """Buggify the first `limit` problems of a data set, and write the rows to `out` as JSON Lines.

    The file is written when all is done. Raises what `buggify` raises, DatasetError when there are no
    problems, and StoreError when the file or the folder beside it cannot be written, or is in use.
    """
    problems = list(islice(read_problems(config), limit))
    if not problems:
        raise DatasetError(f"{config.file_path or config.path}: there are no problems as asked for")
    done = made = 0

    def count(_: str, row: Row | None) -> None:
        nonlocal done, made
        done, made = done + 1, made + (row is not None)
        if on_progress is not None:
            on_progress(done, len(problems), made)

    folder = work_folder(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    is_begun = (folder / DATABASE).exists()
    with RunFolder.open(folder) if is_begun else RunFolder.create(folder.parent, folder.name) as run:
        found = await buggify(
            problems, engine, run.journal, settings, max_concurrency=max_concurrency, on_problem=count
        )
    write_atomically(out, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found.rows))
    return found
