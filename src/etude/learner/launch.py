"""The command that runs a Python module in several processes at once, as a team."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def launch_command(module: str, arguments: Sequence[str], processes: int) -> list[str]:
    """`accelerate launch`, told all that a config file of the user's would otherwise decide.

    When one of the processes fails, the others are ended. `--multi_gpu` is its word for several processes
    on one machine, with GPUs or without.
    """
    options = {
        "num_processes": str(processes),
        "num_machines": "1",
        "machine_rank": "0",
        "main_process_port": "0",
        "gpu_ids": "all",
        "mixed_precision": "no",
        "dynamo_backend": "no",
    }
    told = [text for name, value in options.items() for text in (f"--{name}", value)]
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", *told]
    return [*launch, "--module", module, *arguments]
