"""Whether the config and the versions in a run folder are as they were written, and what is done if not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from etude.core.errors import StoreError
from etude.core.history import History
from etude.core.job import ModelVersion
from etude.groups.lineage import LineageLog
from etude.jobs.folders import StateFolders
from etude.loop.recovery import go_back, way_back
from etude.store.database import DATABASE
from etude.store.facts import SUMMARY, histories_of
from etude.store.figures import last_version
from etude.store.files import write_atomically
from etude.store.journal import Journal
from etude.store.log import EpochLog, histories
from etude.store.repair import locked
from etude.store.run_folder import CONFIG_STEP, RunFolder
from etude.store.stored_config import CONFIG, config_damage, stored_data, target_model, trained_parts
from etude.store.sums import damage_in
from etude.store.versions import stored_at

_VERSION = re.compile(r"v(\d+)")


def check_files(run: Path) -> list[str]:
    """How the config and the versions of a run are damaged, in clauses, each with its file.

    Raises StoreError when the run is in use, or its journal cannot be read.
    """
    with locked(run):
        damage = _config_damage(run)
        # Without a config it is not known which versions there should be.
        needed = [] if damage else _needed(run, histories_of(run))
        folders = dict.fromkeys([*_bases(run), *_folders(run), *needed])
        return damage + [_located(run, folder, clause) for folder in folders for clause in damage_in(folder)]


async def repair_files(run: Path) -> list[str]:
    """Put a damaged config back, set damaged versions aside, and go back from them; what was done.

    Raises StoreError when the run is in use, its journal is damaged, or has no config.
    """
    lines: list[str] = []
    with locked(run):
        damaged = [folder for folder in _folders(run) if damage_in(folder)]
        with Journal(run / DATABASE) as journal:
            if _config_damage(run):
                lines.append(_put_back(run, journal))
            for target, history in histories(journal, run.name).items():
                if _is_here(run, target):
                    lines += await _go_back(run, journal, target, history)
        if lines:
            (run / SUMMARY).unlink(missing_ok=True)
        for folder in damaged:
            aside = _versions_in(folder.parent).set_aside(_number(folder))
            if aside is not None:
                lines.append(f"{folder.name} is damaged, and set aside as {aside.name}")
        for folder in _bases(run):
            if damage_in(folder):
                shutil.rmtree(folder)
                lines.append(f"the base model {folder.name} is damaged, and will be made again from its seed")
    return lines


def _config_damage(run: Path) -> list[str]:
    """The damage of a config that is or was there: a run may be made without one."""
    damage = config_damage(run)
    if damage is None or not ((run / CONFIG).exists() or _kept_config(run)):
        return []
    return [damage]


def _kept_config(run: Path) -> str | None:
    with RunFolder.read(run) as folder:
        text: str | None = folder.journal.get(CONFIG_STEP)
    return text


def _put_back(run: Path, journal: Journal) -> str:
    text = journal.get(CONFIG_STEP)
    if text is None:
        raise StoreError(
            f"{run / CONFIG} is damaged, and the journal has no copy: put one in its place that you have, or "
            "begin a new run"
        )
    write_atomically(run / CONFIG, text, exact=True)
    return f"{CONFIG} is put back as the journal has it"


async def _go_back(run: Path, journal: Journal, target: str | None, history: History) -> list[str]:
    log = EpochLog(journal, target)
    lineage = LineageLog(journal, target or str(target_model(stored_data(run), target)))

    async def damage_of(version: ModelVersion) -> list[str]:
        folder = _folder_of(run, version)
        return [] if folder is None else damage_in(folder)

    async def set_aside(version: ModelVersion) -> list[str]:
        roots = {folder.parent for folder in _needed(run, {target: history})}
        paths = [
            versions.set_aside(number)
            for versions in map(_versions_in, roots)
            for number in versions.numbers()
            if number > version.number
        ]
        return [path.name for path in paths if path is not None]

    way = await way_back(history, log.warm_up_jobs(), damage_of)
    if way is None:
        return []
    return [str(await go_back(journal, log, lineage, history, way, set_aside))]


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


def _versions_in(folder: Path) -> StateFolders:
    return StateFolders(folder, "v", "version")


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("v"))


def _located(run: Path, folder: Path, clause: str) -> str:
    """The clause, with the model's name where several are trained."""
    inside = folder.parent.relative_to(run)
    return clause if inside == Path("checkpoints") else f"{inside}/{clause}"
