"""An agent that sorts letters: one question, one answer."""

import etude


@etude.workflow
async def sort(example: etude.Example, episode: etude.Episode) -> str:
    reply = await episode.chat([{"role": "user", "content": f"Sort: {example.inputs['letters']}"}])
    return reply.text


@etude.evaluator
def in_place(example: etude.Example, output: str) -> float:
    """The share of positions that hold the right letter."""
    right = sum(a == b for a, b in zip(output, example.expected, strict=False))
    return float(right / max(len(output), len(example.expected)))
