"""SIGKILL at every file operation of a short run, and at random moments."""

from __future__ import annotations

import time

from tests.chaos.run import TRAIN, Outcome
from tests.chaos.scene import Figures, Scene

_EVERY = (1, 20)
"""File operations from one kill to the next, in full and with `--quick`."""
_KILLS = (500, 10)
"""At random moments, the same."""
_KILLS_OF_A_RUN = 5
"""At random moments."""


def kill_at_every_operation(scene: Scene) -> Figures:
    """A run for each operation of the one that nobody disturbed, or some, killed there and gone on with."""
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
