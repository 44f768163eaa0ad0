"""An agent that is another program, in another process; any language would do."""

import sys
from pathlib import Path

import etude

PROGRAM = Path(__file__).with_name("sorter.py")


@etude.workflow
async def sort(example: etude.Example, episode: etude.Episode) -> str:
    result = await episode.run([sys.executable, str(PROGRAM), example.inputs["letters"]])
    return result.stdout.strip()


@etude.evaluator
def in_place(example: etude.Example, output: str) -> float:
    """The share of positions that hold the right letter."""
    right = sum(a == b for a, b in zip(output, example.expected, strict=False))
    return float(right / max(len(output), len(example.expected)))
