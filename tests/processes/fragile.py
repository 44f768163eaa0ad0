"""An agent that does what its example says: to itself, to its process, or only its work."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

import etude


def lookup(word: str) -> str:
    """Look a word up."""
    return f"{word}!"


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    """Asks twice, with a tool and a random number between, and then does what it is told."""
    question = [{"role": "user", "content": str(example.inputs["question"])}]
    first = await episode.chat(question)
    async with episode.tools(lookup) as tools:
        call = etude.ToolCall("c0", "lookup", {"word": first.text}, "")
        result = await tools.call(call)
    episode.score("draw", episode.random.random())
    second = await episode.chat(
        [*question, first.message, {"role": "user", "content": str(result["content"])}], temperature=0.5
    )
    do(str(example.inputs.get("do", "")), episode)
    return second.text


def do(deed: str, episode: etude.Episode) -> None:
    """Harm the process."""
    if deed == "exit":
        ctypes.CDLL(None)._exit(3)
    if deed == "tell widths":
        episode.note(str(episode.widths))
    if deed == "raise":
        raise ValueError("as told")
    if deed == "wait":
        episode.note(str(os.getpid()))
        folder = Path(os.environ["FRAGILE_PIDS"])
        (folder / f"{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.05)


@etude.evaluator
def length(example: etude.Example, output: str) -> float:
    """The length of the output; of some examples it ends the process."""
    if example.inputs.get("do") == "exit in evaluator":
        ctypes.CDLL(None)._exit(4)
    return float(len(output))


@etude.workflow
async def stream(example: etude.Example, episode: etude.Episode) -> list[str]:
    """The pieces in which an answer came."""
    client = episode.openai()
    question: Any = [{"role": "user", "content": str(example.inputs["question"])}]
    pieces = await client.chat.completions.create(model="policy", messages=question, stream=True)
    return [piece.choices[0].delta.content or "" async for piece in pieces if piece.choices[0].delta.content]
