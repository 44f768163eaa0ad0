"""Going back from weights that are not as they were written to the last version that is whole.

The epochs after it are forgotten, and done again by the loop: their episodes, calls and scores are in the
journal, so that only their training is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import TypeAlias

from etude.core.history import History, Recovery, WarmUpJob
from etude.core.job import ModelVersion
from etude.groups.lineage import LineageLog
from etude.loop.bookkeeper import Bookkeeper
from etude.store.facts import SUMMARY
from etude.store.journal import Journal
from etude.store.log import EpochLog

DamageOf: TypeAlias = Callable[[ModelVersion], Awaitable[list[str]]]
"""How a version differs from what was written."""

_JOB = re.compile(r".*(-(?:epoch|warm-up)-\d.*)")
"""The name of a job of the loop's: that of the run comes first."""
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
        timestamp=datetime.now(UTC).isoformat(timespec="seconds"),
        damage=way.damage,
        lost=lost,
        back_to=way.version if way.version.number else None,
        epochs=tuple(entry.epoch for entry in later),
    )
    await log.add_recovery(len(history.recoveries) + 1, recovery)
    await _forget_pools(journal, {version.digest for version in lost})
    await lineage.forget_after(way.version.number)
    await _keep_numbers(lineage, history.run_id, way.version.number)
    await set_aside(way.version)
    await log.forget_after(way.epoch)
    if not way.keeps_warm_up:
        await lineage.forget_base()
        await log.forget_warm_up()
    return recovery


async def _keep_numbers(lineage: LineageLog, run_id: str, number: int) -> None:
    """Have the jobs of versions above a number make them again under the numbers that they had.

    Jobs are called by the run, which may have been renamed, and what was sampled from a version names its
    number.
    """
    for name, job in lineage.jobs().items():
        match = _JOB.fullmatch(name)
        if match is None or job.number is None or job.number <= number:
            continue
        if (now := run_id + match[1]) != name:
            await lineage.add_job(now, job)
            await lineage.take_back_job(name, None)


async def _forget_pools(journal: Journal, digests: set[str]) -> None:
    """Have opponents that were to be versions which are lost drawn again from the versions made anew."""
    for key, (versions, _) in [*journal.scan("opponents/")]:
        if any(version["digest"] in digests for version in versions):
            await journal.forget(key)
