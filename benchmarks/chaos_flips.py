"""Single bytes of a stopped run's journal and weights that are not what they were: a part of `chaos.py`."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

from chaos_run import TRAIN, Outcome, ShortRun
from tests.cli.killed import killed_after

Note = Callable[[str], None]

_STOPPED_AFTER = 110
"""Events: in the last of three epochs, so that there are versions and episodes of it."""


def flip_bytes(run: ShortRun, folder: Path, flips: int, choice: random.Random, note: Note) -> Outcome:
    """Go on with copies of a stopped run in which one byte is another; its file is drawn first.

    Either the run is refused, or it ends as the one that nobody disturbed.
    """
    run.clear()
    killed_after(_STOPPED_AFTER, 0.0, *TRAIN, folder=run.folder)
    stopped, outcome = folder / "stopped", Outcome()
    shutil.copytree(run.path, stopped)
    files = sorted(
        path.relative_to(stopped)
        for path in stopped.rglob("*")
        if path.stat().st_size
        and (path.name.startswith("run.db") or "checkpoints" in path.parts)
        and path.is_file()
    )
    note(f"{flips} flips in {len(files)} files of a stopped run")
    for _ in range(flips):
        name = choice.choice(files)
        run.clear()
        shutil.copytree(stopped, run.path)
        place = choice.randrange((run.path / name).stat().st_size)
        bit = 1 << choice.randrange(8)
        with (run.path / name).open("r+b") as file:
            file.seek(place)
            value = file.read(1)[0]
            file.seek(place)
            file.write(bytes([value ^ bit]))
        outcome.harmed += 1
        code, errors = run.goes_on()
        what = f"byte {place} of {name}, bit {bit:08b}"
        if code and not errors.strip():
            outcome.failures.append(f"{what}: it ended with {code} and said nothing")
        elif code and "Traceback" in errors:
            outcome.failures.append(f"{what}: {errors[-500:]}")
        elif code:
            outcome.refused += 1
        elif found := run.differences():
            outcome.unequal.append(f"{what}: {'; '.join(found[:3])}")
    return outcome
