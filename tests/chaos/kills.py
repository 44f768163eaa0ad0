"""SIGKILL at every file operation of a short run and at random moments, and single bits that are flipped."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from tests.chaos.run import TRAIN, Outcome, ShortRun
from tests.chaos.scene import Figures, Scene

_EVERY = (1, 20)
"""File operations from one kill to the next, in full and with `--quick`."""
_KILLS = (500, 10)
"""At random moments, the same."""
_KILLS_OF_A_RUN = 5
"""At random moments."""


def kill_at_every_operation(scene: Scene) -> Figures:
    """A run for each operation of the one that nobody disturbed, or some, killed there and resumed."""
    run, every, note = scene.short_run, _EVERY[scene.quick], scene.note
    outcome, number = Outcome(), 1
    operations = run.operations.stat().st_size
    note(f"killed at each of some {operations} file operations, in steps of {every}")
    with run.attended():
        while True:
            run.clear()
            code, errors = run.victim(number, *TRAIN)
            if code == 0:
                return outcome.figures("kills")  # It came to fewer operations than that.
            if code != -9:
                raise SystemExit(f"the run that is to be killed fails by itself: {errors[-2000:]}")
            outcome.harmed += 1
            run.go_on(outcome, f"killed at file operation {number}")
            if outcome.harmed % 50 == 0:
                note(f"{outcome.harmed} kills, {len(outcome.problems)} problems")
            number += every


def kill_at_random(scene: Scene) -> Figures:
    """Runs that are killed again and again at random moments, until there were so many kills."""
    run, kills, choice = scene.short_run, _KILLS[scene.quick], scene.choice("random")
    outcome = Outcome()
    with run.attended():
        run.clear()
        begun = time.monotonic()
        run.victim(0, *TRAIN)
        seconds = time.monotonic() - begun
        scene.note(f"{kills} kills at random moments of runs of {seconds:.1f} s")
        while outcome.harmed < kills:
            run.clear()
            moments = [choice.random() * seconds for _ in range(_KILLS_OF_A_RUN)]
            for moment in moments:
                victim = run.begun(0, *run.command)
                time.sleep(moment)
                victim.kill()
                victim.communicate(timeout=60)
                if victim.wait() != -9:
                    break
                outcome.harmed += 1
            run.go_on(outcome, f"killed after {', '.join(f'{moment:.3f}' for moment in moments)} s")
    return outcome.figures("kills")


_FLIPS = (200, 10)
"""In full, and with `--quick`."""
_LEFT = 30
"""File operations to the end of the run, where it is stopped: it has versions, and its journal a log."""


def flip_bytes(scene: Scene) -> Figures:
    """Go on with copies of a stopped run in which one bit is another; its file is drawn first.

    Each is refused with a reason, or goes back to weights that are whole and says so, or nothing has changed:
    it ends as the one that nobody disturbed. Otherwise it is `silent`.
    """
    run, flips, choice = scene.short_run, _FLIPS[scene.quick], scene.choice("flips")
    outcome, stopped = Outcome(), scene.folder / "stopped"
    with run.attended():
        run.clear()
        code, errors = run.victim(run.operations.stat().st_size - _LEFT, *TRAIN)
        if code != -9:
            raise SystemExit(f"the run that is to be stopped ends by itself: {errors[-2000:]}")
        shutil.copytree(run.path, stopped)
        made = run.paid.state()
        files = [path.relative_to(stopped) for path in sorted(stopped.rglob("*")) if _is_harmed(path)]
        scene.note(f"{flips} flips in {len(files)} files of a stopped run")
        for _ in range(flips):
            run.clear()
            run.paid.go_back_to(made)
            shutil.copytree(stopped, run.path)
            _go_on(run, outcome, _flip(run.path, choice.choice(files), choice))
    ends = {"refused": outcome.refused, "recovered": outcome.recovered, "silent": len(outcome.unequal)}
    return outcome.figures("faults") | ends


def _is_harmed(path: Path) -> bool:
    """Whether a file is of the journal or of a version, and not empty."""
    is_kept = path.name.startswith("run.db") or "checkpoints" in path.parts
    return is_kept and path.is_file() and path.stat().st_size > 0


def _flip(folder: Path, name: Path, choice: random.Random) -> str:
    """Flip a bit of a file; which one."""
    content = bytearray((folder / name).read_bytes())
    place, bit = choice.randrange(len(content)), 1 << choice.randrange(8)
    content[place] ^= bit
    (folder / name).write_bytes(content)
    return f"byte {place} of {name}, bit {bit:08b}"


def _go_on(run: ShortRun, outcome: Outcome, what: str) -> None:
    outcome.harmed += 1
    process = run.begun(0, *run.command)
    output, errors = process.communicate(timeout=120)
    if process.wait():
        if not errors.strip() or "Traceback" in errors:
            outcome.failures.append(f"{what}: it ended with {process.wait()} and says {errors[-500:]!r}")
        outcome.refused += 1
        return
    recovered = run.recoveries()
    if found := run.differences():
        outcome.unequal.append(f"{what}: {'; '.join(found[:3])}")
    elif recovered and "damaged" not in output:
        outcome.unequal.append(f"{what}: it went back, and the console did not say so")
    outcome.recovered += bool(recovered)
    outcome.doubled += [f"{what}: {each}" for each in run.twice()]
