"""The seam for what starts the processes of a team: a command that lives for as long as they do.

Whoever runs the command watches and ends it as any process. It exits with 0 once all processes have done
their part, SIGTERM asks them to make way, and their output is its own. Those that outlive it on this machine
hold locks of their job.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

_ROOT_CAUSE = re.compile(r"Root Cause.*?rank\s*: (\d+).*?exitcode\s*: (-?\d+)", re.DOTALL)
"""In the words of torch's launcher."""


class Launcher(Protocol):
    """A way to start the processes of a team."""

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        """The command that runs a Python module in several processes at once, which are to be `joined`.

        `folder` is the job's, and may be written to.
        """

    def first_failure(self, log: str) -> str | None:
        """Which process ended first and how, by the output of the command; None where it does not say."""


class LocalLauncher:
    """Processes on this machine, started by `accelerate launch`."""

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        """`accelerate launch` is given all that a config file of the user's would otherwise decide.

        When one of the processes fails, it ends the others. `--multi_gpu` is its word for several processes
        on one machine, with GPUs or without.
        """
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"]
        machines = ["--num_machines=1", "--machine_rank=0", "--main_process_port=0", "--gpu_ids=all"]
        kind = ["--mixed_precision=no", "--dynamo_backend=no", f"--num_processes={processes}"]
        return [*launch, *machines, *kind, "--module", module, *arguments]

    def first_failure(self, log: str) -> str | None:
        """The root cause that the launcher found last."""
        causes = _ROOT_CAUSE.findall(log)
        return f"process {causes[-1][0]}: {exit_words(int(causes[-1][1]))}" if causes else None


def exit_words(code: int) -> str:
    """How a process ended, by its exit code."""
    return f"exit code {code}" if code >= 0 else f"signal {-code}"
