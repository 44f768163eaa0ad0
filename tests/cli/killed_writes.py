"""A command that kills itself: `python -m tests.cli.killed_writes COUNT ARGUMENTS`.

It gets kill -9 at its COUNT-th operation on files and folders of versions.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

OPERATIONS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir"}


def main(count: int, arguments: list[str]) -> None:
    left = count

    def hook(event: str, values: tuple[Any, ...]) -> None:
        nonlocal left
        if event in OPERATIONS and "/checkpoints/v" in str(values[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    from etude.cli.app import app

    app(arguments)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
