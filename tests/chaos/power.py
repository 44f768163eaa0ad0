"""The power goes at some moment of a short run, and what was not synced is lost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

from tests.chaos.disk import Disk, Loss
from tests.chaos.run import TRAIN, Outcome, ShortRun
from tests.chaos.strace import Call, calls_of, traced

Note = Callable[[str], None]

_LOSSES: tuple[Loss, ...] = ("all", "content", "names", "some")


@dataclass
class Moment:
    """When the power goes: the files as they are then, and what was acknowledged by then."""

    number: int
    """Of the call after which it goes."""
    at: float
    after_sync: bool
    disk: Disk
    acknowledged: bytes


def lose_power(run: ShortRun, folder: Path, share: int, choice: random.Random, note: Note) -> Outcome:
    """Go on from what is left after every `share`-th sync of the run and as many other moments."""
    outcome, trace = Outcome(), folder / "trace"
    with run.attended():
        run.clear()
        traced(run.command_line(0, *TRAIN), run.folder, run.environment, trace, folder / "console")
        paid = run.paid.state()
        syncs, others = _moments_to_try(run, trace, share, choice)
        note(f"power is lost after {len(syncs)} syncs and at {len(others)} other moments")
        losses = cycle(_LOSSES)
        for moment in _moments(run, trace, syncs | others):
            loss = next(losses) if moment.after_sync else "some"
            run.clear()
            moment.disk.write_to(run.folder, loss, choice)
            run.acknowledged.write_bytes(moment.acknowledged)
            run.paid.go_back_to(paid)
            run.paid.go_back(moment.at)
            outcome.harmed += 1
            run.go_on(outcome, f"power lost after call {moment.number} of the trace, with it {_LOST[loss]}")
    return outcome


_LOST = {
    "all": "all that was not synced",
    "content": "contents that were not synced",
    "names": "names that were not synced",
    "some": "some of what was not synced",
}


def _moments_to_try(
    run: ShortRun, trace: Path, share: int, choice: random.Random
) -> tuple[set[int], set[int]]:
    """Numbers of calls: syncs, and others by chance. Raises SystemExit where not all could be followed."""
    disk, syncs, others = Disk(run.folder, "runs"), list[int](), list[int]()
    for number, call in enumerate(calls_of(trace)):
        if disk.follow(call):
            syncs.append(number)
        elif disk.is_about(call):
            others.append(number)
    if wrong := disk.is_as(run.folder):
        raise SystemExit(f"not all that the run did to its files was followed: {', '.join(wrong)}")
    chosen = {*syncs[::share]}
    return chosen, {*choice.sample(others, len(chosen))}


def _moments(run: ShortRun, trace: Path, numbers: set[int]) -> Iterator[Moment]:
    disk, acknowledged = Disk(run.folder, "runs"), bytearray()
    for number, call in enumerate(calls_of(trace)):
        is_sync = disk.follow(call)
        if _is_to(call, run.acknowledged):
            acknowledged += b"".join(call.texts)
        if number in numbers:
            yield Moment(number, call.at, is_sync, disk, bytes(acknowledged))


def _is_to(call: Call, path: Path) -> bool:
    return call.name == "write" and call.file == str(path)
