"""Whether the config and versions of a run are as they were written, and going back from what is not.

The epochs after the last whole version are forgotten, and done again by the loop: their episodes, calls and
scores are in the journal, so that only their training is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeAlias

from etude.core.history import History, Recovery, WarmUpJob
from etude.core.job import ModelVersion
from etude.groups.lineage import LineageLog
from etude.loop.bookkeeper import Bookkeeper
from etude.store.database import DATABASE, damage_of, open_database
from etude.store.facts import SUMMARY, histories_of
from etude.store.figures import last_version
from etude.store.files import damage_in
from etude.store.journal import Journal
from etude.store.log import EpochLog
from etude.store.run_folder import LOCK, RunLock
from etude.store.stored_config import config_damage, stored_data, trained_parts
from etude.store.versions import stored_at

DamageOf: TypeAlias = Callable[[ModelVersion], Awaitable[list[str]]]
"""How a version differs from what was written."""

_BASE = ModelVersion(number=0, location="", digest="")


@dataclass(frozen=True, slots=True)
class WayBack:
    """Where a run goes back to."""

    damage: tuple[str, ...]
    """Why, a clause for each file."""
    epoch: int = 0
    """The last epoch that is kept; 0 keeps none."""
    version: ModelVersion = _BASE
    """The weights after it."""
    keeps_warm_up: bool = False


async def recover(books: Bookkeeper) -> None:
    """Where the version to go on from is damaged, go back to the last whole one, and say so."""
    log, adapter, run = books.record.log, books.adapter, books.runtime.run
    way = await way_back(books.record.history, log.warm_up_jobs(), adapter.damage)
    if way is None:
        return
    recovery = await go_back(
        run.journal, log, books.line.log, books.record.history, way, set_aside=adapter.go_back
    )
    (run.path / SUMMARY).unlink(missing_ok=True)
    books.record.reload()
    books.runtime.progress.message(str(recovery), warning=True)


async def way_back(history: History, warm_up: Sequence[WarmUpJob], damage_of: DamageOf) -> WayBack | None:
    """Where to go back to from the last version; None where that is whole, and the weights of a warm-up are.

    `warm_up` are the jobs of a warm-up so far. Without the weights that training began with everything is
    done again: they are what algorithms compare with.
    """
    start = history.start
    if start is not None and (damage := await damage_of(start)):
        return WayBack(tuple(damage))
    if history.warm_up is None and not history.epochs and warm_up:
        start = warm_up[-1].version
    # One after the other: nearly always the first is whole, and a run may have thousands.
    steps = ((each.epoch, history.went_back(each.epoch) or each.version) for each in reversed(history.epochs))
    damaged: dict[int, list[str]] = {}
    for epoch, version in chain(steps, [(0, start)]):
        if version is None or version.number in damaged:
            continue
        damage = await damage_of(version)
        if not damage:
            lost = tuple(clause for clauses in reversed(damaged.values()) for clause in clauses)
            return WayBack(lost, epoch, version, keeps_warm_up=True) if damaged else None
        damaged[version.number] = damage
    lost = tuple(clause for clauses in reversed(damaged.values()) for clause in clauses)
    return WayBack(lost) if damaged else None


async def go_back(
    journal: Journal,
    log: EpochLog,
    lineage: LineageLog,
    history: History,
    way: WayBack,
    set_aside: Callable[[ModelVersion], Awaitable[list[str]]],
) -> Recovery:
    """Forget what came after the version that is gone back to, and set what is stored of it aside.

    The epochs are forgotten last: whoever is killed before that goes back the next time.
    """
    later = [entry for entry in history.epochs if entry.epoch > way.epoch]
    made = {entry.version.number: entry.version for entry in later if entry.version is not None}
    if history.start is not None and not way.keeps_warm_up:
        made[history.start.number] = history.start
    lost = tuple(made[number] for number in sorted(made) if number > way.version.number)
    recovery = Recovery(
        damage=way.damage,
        lost=lost,
        back_to=way.version if way.version.number else None,
        epochs=tuple(entry.epoch for entry in later),
    )
    await log.add_recovery(len(history.recoveries) + 1, recovery)
    digests = {version.digest for version in lost}
    for key, versions in [*journal.scan("opponents/")]:
        # Opponents that were to be versions which are lost are drawn again from those made anew.
        if any(version["digest"] in digests for version in versions):
            await journal.forget(key)
    await lineage.forget_after(way.version.number)
    await set_aside(way.version)
    await log.forget_after(way.epoch)
    if not way.keeps_warm_up:
        await lineage.forget_base()
        await log.forget_warm_up()
    return recovery


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
        made = sorted(path for path in (run / "bases").glob("*") if path.is_dir())
        stored = sorted((run / "checkpoints").rglob("v*"))
        made += [path for path in stored if path.is_dir() and _VERSION.fullmatch(path.name)]
        folders = dict.fromkeys([*made, *_needed(run)])
        return [_located(run, folder, clause) for folder in folders for clause in damage_in(folder)]


@contextmanager
def _locked(run: Path) -> Iterator[None]:
    """Hold a run while it is looked at. Raises StoreError when it is in use."""
    lock = RunLock(run / LOCK)
    try:
        yield
    finally:
        lock.release()


def _needed(run: Path) -> Iterator[Path]:
    for target, history in histories_of(run).items():
        # Versions of other adapters than `local` are not here.
        if trained_parts(stored_data(run, required=False), target)["backend"] == "local":
            for version in (history.start, last_version(history)):
                folder = stored_at(run, version) if version is not None and version.number else None
                if folder is not None:
                    yield folder


def _located(run: Path, folder: Path, clause: str) -> str:
    """The clause, with the model's name where several are trained."""
    inside = folder.parent.relative_to(run)
    return clause if inside == Path("checkpoints") else f"{inside}/{clause}"
