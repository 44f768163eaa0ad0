"""Coding agents as programs: each with a home, a folder and a key of its own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.clients.drive import CODING_TASK, same

BIN = Path(__file__).parent / "node" / "node_modules" / ".bin"
_SECONDS = 100


def solve(
    command: Sequence[str],
    environment: Mapping[str, str],
    prepare: Callable[[Path], None] = lambda home: None,
) -> str:
    """Have an agent write the sum of 1 and 2 to a file of a new folder; all that it printed.

    `command` begins with the name of a program of npm's. `prepare` is given the agent's home.
    """
    with tempfile.TemporaryDirectory() as folder:
        home, work = Path(folder, "home"), Path(folder, "work")
        home.mkdir()
        work.mkdir()
        prepare(home)
        done = subprocess.run(
            [BIN / command[0], *command[1:], CODING_TASK],
            cwd=work,
            env={"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        same((work / "answer.txt").read_text(), "3\n")
        return done.stdout
