"""An agent that is another program, in another process; any language would do."""

import asyncio
import os
import sys
from pathlib import Path

import etude

PROGRAM = Path(__file__).with_name("sorter.py")


@etude.workflow
async def sort(example: etude.Example, episode: etude.Episode) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        PROGRAM,
        example.inputs["letters"],
        env=os.environ | episode.endpoint.environment,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(f"{PROGRAM.name} ended with status {process.returncode}")
    return output.decode().strip()


@etude.evaluator
def in_place(example: etude.Example, output: str) -> float:
    """The share of positions that hold the right letter."""
    right = sum(a == b for a, b in zip(output, example.expected, strict=False))
    return float(right / max(len(output), len(example.expected)))
