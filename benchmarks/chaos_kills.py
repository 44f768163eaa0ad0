"""SIGKILL at every file operation of a short run, and at random moments: a part of `chaos.py`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from chaos_run import TRAIN, Outcome, ShortRun
from tests.cli.projects import process

Note = Callable[[str], None]

_KILLS_OF_A_RUN = 5
"""At random moments."""


def kill_at_every_operation(run: ShortRun, folder: Path, every: int, note: Note) -> Outcome:
    """A run for each `every`-th operation of the one that nobody disturbs, killed there and gone on with."""
    run.clear()
    counts, outcome = folder / "counts", Outcome()
    code, errors = run.victim(0, counts, *TRAIN)
    if code:
        raise SystemExit(f"the run that is to be killed fails by itself: {errors[-2000:]}")
    operations = counts.stat().st_size
    note(f"killed at each of {operations} file operations, in steps of {every}")
    for number in range(1, operations + 1, every):
        run.clear()
        if run.victim(number, counts, *TRAIN)[0] != -9:
            continue  # The order of operations of two threads is not always the same.
        outcome.harmed += 1
        _go_on(run, outcome, f"killed at file operation {number}")
    return outcome


def kill_at_random(run: ShortRun, kills: int, choice: random.Random, note: Note) -> Outcome:
    """Runs that are killed again and again at random moments, until there were so many kills."""
    outcome, begun = Outcome(), time.monotonic()
    run.clear()
    process(*TRAIN, folder=run.folder).communicate(timeout=120)
    seconds = time.monotonic() - begun
    note(f"{kills} kills at random moments of runs of {seconds:.1f} s")
    while outcome.harmed < kills:
        run.clear()
        command, moments = TRAIN, []
        for _ in range(_KILLS_OF_A_RUN):
            victim = process(*command, folder=run.folder)
            moments.append(choice.random() * seconds)
            time.sleep(moments[-1])
            victim.kill()
            victim.communicate(timeout=60)
            if victim.wait() != -9:
                break
            outcome.harmed += 1
            begun_already = (run.path / "config.yml").exists() and (run.path / "run.db").exists()
            command = ("resume", "run") if begun_already else TRAIN
        _go_on(run, outcome, f"killed after {', '.join(f'{moment:.3f}' for moment in moments)} s")
    return outcome


def _go_on(run: ShortRun, outcome: Outcome, what: str) -> None:
    code, errors = run.goes_on()
    if code:
        outcome.failures.append(f"{what}: {errors[-500:]}")
    elif found := run.differences():
        outcome.unequal.append(f"{what}: {'; '.join(found[:3])}")
