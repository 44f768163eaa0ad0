"""A runner that plays agents of a given shape without playing them: it waits, and commits what they would.

It speaks to the head as every runner does, over any stream. As a script it is a runner's process.
"""

from __future__ import annotations

import asyncio
import functools
import json
import math
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from subprocess import PIPE
from typing import Any

from etude.core.call import Call, ChatRequest, Completion, Usage
from etude.core.episode import EpisodeRecord
from etude.core.errors import EtudeError
from etude.core.example import Example
from etude.core.keys import fold
from etude.runners.frames import Disconnected, Stream, introduce
from etude.runners.link import Link, Note
from etude.runners.process import ProcessEnd
from etude.runners.program import Invitation
from etude.store.encode import encode_call, encode_episode
from etude.store.episodes import call_key

EVALUATOR = "reward"
OTHER_STEPS = 2
"""Of an episode in the journal, besides its calls: its record and its score."""


@dataclass(frozen=True)
class Work:
    """The shape of all episodes."""

    calls: int = 5
    """Turns of one conversation."""
    tokens: int = 1024
    """That each call adds to it: half of them read, half of them sampled."""
    seconds: float = 0.0
    """From one commit to the next call's answer, on average: the model's time and the agent's."""
    spread: float = 0.5
    """The standard deviation of the logarithm of that time."""

    def wait(self, episode: str, turn: int) -> float:
        """Seconds before a call is answered; the same for the same call."""
        normal = random.Random(fold(0, episode, turn)).gauss(-(self.spread**2) / 2, self.spread)
        return self.seconds * math.exp(normal)


@functools.cache
def conversation(work: Work) -> list[Call]:
    """The calls of an episode."""
    half, calls, ids = work.tokens // 2, [], tuple[int, ...]()
    messages: tuple[dict[str, Any], ...] = ()
    for turn in range(work.calls):
        messages += ({"role": "user", "content": "wor " * half},)
        ids += tuple(range(1000, 1000 + half))
        completion = Completion(
            message={"role": "assistant", "content": "wor " * half},
            prompt_ids=ids,
            completion_ids=tuple(range(2000, 2000 + half)),
            logprobs=tuple(-0.1234567 * (1 + place % 7) for place in range(half)),
            usage=Usage(len(ids), half),
        )
        calls.append(Call(turn, "workflow", "policy", ChatRequest(messages), completion))
        messages += (completion.message,)
        ids += completion.completion_ids or ()
    return calls


@functools.cache
def steps_of(work: Work) -> dict[str, Any]:
    """The steps that an episode commits for its calls, by the call's name."""
    steps: dict[str, Any] = {}
    parent: tuple[str, Call] | None = None
    for turn, call in enumerate(conversation(work)):
        name = f"turn{turn}/0"
        steps[name] = encode_call(call, parent)
        parent = name, call
    return steps


class ShapedRunner:
    """Answers the head."""

    def __init__(self, stream: Stream, work: Work, on_commit: Callable[[float], None]) -> None:
        self.link = Link(stream, self._answer)
        self._work = work
        self._on_commit = on_commit
        self._steps = steps_of(work)
        # Every conversation begins with these calls; only their names are kept with an episode.
        self._names = dict(enumerate(self._steps))
        self._calls = [replace(call, completion=None) for call in conversation(replace(work, tokens=2))]

    async def _answer(self, method: str, parameters: dict[str, Any], note: Note) -> Any:
        if method == "play":
            await self._play(**parameters)
        return {"calls": {}, "addresses": {}} if method == "ping" else None

    async def _play(
        self, id: str, generation: int, sampling: Any, example: dict[str, Any], steps: Mapping[str, Any]
    ) -> None:
        for turn, (name, step) in enumerate(self._steps.items()):
            key = call_key(id, name)
            if key not in steps:
                await asyncio.sleep(self._work.wait(id, turn))
                asked_at = asyncio.get_running_loop().time()
                await self._put(key, step)
                self._on_commit(asyncio.get_running_loop().time() - asked_at)
        if id not in steps:
            record = EpisodeRecord(id, Example(**example), generation, tuple(self._calls), output="done")
            await self._put(id, encode_episode(record, self._names))
        score = f"{id}/score/{EVALUATOR}"
        if score not in steps:
            await self._put(score, {"score": 1.0, "reasoning": None, "error": None})

    async def _put(self, key: str, value: Any) -> None:
        await self.link.ask("put", {"key": key, "value": value})


async def run(
    stream: Stream, number: int, key: bytes, work: Work, on_commit: Callable[[float], None] = lambda _: None
) -> None:
    """Be a runner until the head is gone. `on_commit` is told the seconds that each call's commit took."""
    try:
        await introduce(stream, number, key)
    except Disconnected:
        return
    await ShapedRunner(stream, work, on_commit).link.serve()


class ShapedProcess:
    """A process of such a runner."""

    log = "nothing"
    node = "here"

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ended(self) -> ProcessEnd:
        """Wait for its end."""
        return ProcessEnd(f"ended with exit code {await self._process.wait()}")

    def kill(self) -> None:
        """End it."""
        if self._process.returncode is None:
            self._process.kill()

    def memory(self) -> float:
        """Not measured."""
        return 0.0

    def last_words(self) -> str:
        """Nothing: it writes where this process does."""
        return ""


class ShapedLauncher:
    """Starts such runners in processes of this machine, which call the head as those of a cluster do."""

    address = "127.0.0.1"

    def __init__(self, work: Work) -> None:
        self._work = work

    async def launch(self, invitation: Invitation, place: int) -> ShapedProcess:
        """Start one."""
        arguments = json.dumps([asdict(invitation), asdict(self._work)])
        process = await asyncio.create_subprocess_exec(sys.executable, str(Path(__file__)), stdin=PIPE)
        assert process.stdin is not None
        process.stdin.write(f"{arguments}\n".encode())
        return ShapedProcess(process)


async def _main() -> None:
    invited, shaped = json.loads(sys.stdin.readline())
    invitation, work = Invitation(**invited), Work(**shaped)
    host, _, port = invitation.address.rpartition(":")
    try:
        stream = Stream(*await asyncio.open_connection(host, int(port)))
        await run(stream, invitation.number, bytes.fromhex(invitation.key), work)
    except (OSError, EtudeError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    asyncio.run(_main())
