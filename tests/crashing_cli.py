"""Kills the command line, and resumes: `python -m tests.crashing_cli FOLDER SEED COUNT`.

FOLDER has a `config.yml`. It is trained once as a whole, and COUNT times with a kill -9 after a random number
of function calls, of Python's and of C's, in any thread; such a run goes on with `etude resume`, which is
killed once more before it may come to the end. The kills are spread over the whole length of a run.

Children are forked, so that nothing is imported twice, and they draw no plots.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import etude.components
import etude.report.files
import etude.verbs
from etude.cli.app import app

NEVER = 1 << 62
CALLS = Path("calls")
"""Where a child that comes to its end writes how many calls it made."""


class Countdown:
    """Kills this process at a certain call."""

    def __init__(self, kill_at: int) -> None:
        self.made = 0
        self._kill_at = kill_at

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        self.made += 1
        if self.made == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def start(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)

    def stop(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)


def etude_in_a_child(arguments: Sequence[str], kill_at: int = NEVER) -> int:
    """The exit code of `etude ARGUMENTS`, or -9 when it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = _etude(arguments, kill_at)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _etude(arguments: Sequence[str], kill_at: int) -> int:
    output = os.open("output.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    countdown, train_in = Countdown(kill_at), etude.verbs.train_in

    async def counted(*given: Any, **named: Any) -> Any:
        countdown.start()
        try:
            return await train_in(*given, **named)
        finally:
            countdown.stop()

    etude.verbs.train_in = counted  # type: ignore[assignment]
    etude.report.files.write_reward_plot = lambda history, path: None  # type: ignore[assignment]
    try:
        app([*arguments])
    except SystemExit as exit:
        CALLS.write_text(str(countdown.made))
        return int(exit.code or 0)
    return 1


def main(folder: Path, seed: int, count: int) -> None:
    os.chdir(folder)
    points = random.Random(seed)
    assert etude_in_a_child(train_into("whole")) == 0
    length = int(CALLS.read_text())
    outcomes = []
    for number in range(count):
        point = int((number + points.random()) * length / count) + 1
        trained = etude_in_a_child(train_into(f"killed-{number}"), point)
        resumed, resume = 0, ["resume", f"killed-{number}/run"]
        if trained == -signal.SIGKILL:
            resumed = etude_in_a_child(resume, points.randrange(1, length))
        if resumed == -signal.SIGKILL:
            resumed = etude_in_a_child(resume)
        outcomes.append({"point": point, "trained": trained, "resumed": resumed})
    Path("outcomes.json").write_text(json.dumps(outcomes))


def train_into(output_dir: str) -> list[str]:
    return ["train", "config.yml", "--name", "run", "-o", f"finetuning.output_dir={output_dir}"]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
