"""Whether the journal, the config and the versions in a run folder are as they were written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from etude.core.history import History
from etude.core.job import ModelVersion
from etude.store.database import DATABASE, damage_of, open_database
from etude.store.facts import histories_of
from etude.store.figures import last_version
from etude.store.lock import RunLock
from etude.store.run_folder import LOCK
from etude.store.stored_config import config_damage, stored_data, trained_parts
from etude.store.sums import damage_in
from etude.store.versions import stored_at

_VERSION = re.compile(r"v(\d+)")


def check_journal(run: Path) -> list[str]:
    """How the journal of a run is damaged, in sentences. Raises StoreError when the run is in use."""
    with _locked(run), closing(open_database(run / DATABASE)) as connection:
        return damage_of(connection)


def check_files(run: Path) -> list[str]:
    """How the config and the versions of a run are damaged, in clauses, each with its file.

    Raises StoreError when the run is in use, or its journal cannot be read.
    """
    with _locked(run):
        if (damage := config_damage(run)) is not None:
            # Without a config it is not known which versions there should be.
            return [damage]
        folders = dict.fromkeys([*_bases(run), *_folders(run), *_needed(run, histories_of(run))])
        return [_located(run, folder, clause) for folder in folders for clause in damage_in(folder)]


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Hold a run while it is looked at. Raises StoreError when it is in use."""
    lock = RunLock(run / LOCK)
    try:
        yield
    finally:
        lock.release()


def _bases(run: Path) -> Iterator[Path]:
    """The folders of models that were made for the run."""
    yield from (path for path in sorted((run / "bases").glob("*")) if path.is_dir())


def _folders(run: Path) -> Iterator[Path]:
    """The folders of all versions that are there."""
    for path in sorted((run / "checkpoints").rglob("v*")):
        if path.is_dir() and _VERSION.fullmatch(path.name):
            yield path


def _needed(run: Path, by_target: Mapping[str | None, History]) -> Iterator[Path]:
    """Where the versions should be that the run goes on from."""
    for target, history in by_target.items():
        if _is_here(run, target):
            for version in (history.start, last_version(history)):
                if version is not None and (folder := _folder_of(run, version)) is not None:
                    yield folder


def _is_here(run: Path, target: str | None) -> bool:
    """Whether the versions of a target are those of the adapter `local`."""
    return bool(trained_parts(stored_data(run, required=False), target)["backend"] == "local")


def _folder_of(run: Path, version: ModelVersion) -> Path | None:
    return stored_at(run, version) if version.number else None


def _located(run: Path, folder: Path, clause: str) -> str:
    """The clause, with the model's name where several are trained."""
    inside = folder.parent.relative_to(run)
    return clause if inside == Path("checkpoints") else f"{inside}/{clause}"
