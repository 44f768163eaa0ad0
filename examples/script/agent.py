"""An agent that is another program, in another process; any language would do."""

import sys
from pathlib import Path

import etude

HERE = Path(__file__).parent


@etude.workflow
async def sort(example: etude.Example, episode: etude.Episode, program: str = "sorter.py") -> str:
    interpreter = sys.executable if program.endswith(".py") else "sh"
    result = await episode.run([interpreter, str(HERE / program), example.inputs["letters"]])
    return result.stdout.strip()


@etude.evaluator
def in_place(example: etude.Example, output: str) -> float:
    """The share of positions that hold the right letter."""
    right = sum(a == b for a, b in zip(output, example.expected, strict=False))
    return float(right / max(len(output), len(example.expected)))
