"""The CPU time that a turn takes in Etude beyond the environment's own loop: give it a config.

A turn is an answer of a model. The model answers at once on both sides, episodes come one after another,
and what is counted is the CPU time of this process: `Etude's / its turns - the own loop's / its turns`. In
Etude every call and score is journalled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from etude.config.builder import Builder
from etude.config.document import read_document
from etude.config.load import parse_config
from etude.config.schema import Config
from etude.core.call import ChatRequest, Completion
from etude.core.example import Example
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.store.journal import Journal

EPISODES, ROUNDS = 200, 3
"""Episodes of a round, and rounds of which the median counts; the first one comes on top."""

Block = Mapping[str, Any]
Message = dict[str, Any]
Spent = tuple[float, int]
"""Seconds of CPU time, and the turns that they were spent on."""
OwnLoop = Callable[[Block, Sequence[Example]], Awaitable[Spent]]


def legal_answer(messages: Sequence[Message]) -> Message:
    """An answer that the environments here accept: a call of the calculator, an action, or a number."""
    text = str(messages[-1]["content"])
    expression = re.fullmatch(r"What is (\d+) (plus|times) (\d+)\?", text)
    if expression:
        sign = {"plus": "+", "times": "*"}[expression[2]]
        arguments = json.dumps({"expression": f"{expression[1]}{sign}{expression[3]}"})
        function = {"name": "calculator", "arguments": arguments}
        call = {"id": "call_0", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    piles = re.findall(r"pile (\d): ([1-9])", text.rpartition("Current Pile")[2])
    actions = re.findall(r"\[[a-z]+\]", text)
    said = f"[{piles[0][0]} 1]" if piles else actions[-1] if actions else "1"
    return {"role": "assistant", "content": said}


class InstantEngine:
    """Answers in no time, with tokens as a real engine has them."""

    version = 0

    async def complete(self, request: ChatRequest) -> Completion:
        """A legal answer to the last message."""
        prompt = tuple(range(64 * len(request.messages)))
        message = legal_answer(request.messages)
        return Completion(message, prompt_ids=prompt, completion_ids=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3))

    async def adopt(self, version: Any) -> None:
        """There are no weights."""

    async def close(self) -> None:
        """There is nothing to free."""


async def in_etude(config: Config, examples: Sequence[Example], builder: Builder) -> Spent:
    """The episodes of the examples, as training plays them."""
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
        engines = dict.fromkeys(config.llms, InstantEngine())
        collector = Collector(
            await builder.get_workflow(),
            engines,
            journal,
            limits=Limits(max_concurrency=1),
            default_model=next(iter(engines)),
        )
        jobs = [EpisodeJob(f"{example.id}/0", example) for example in examples]
        started, turns = time.process_time(), 0
        async for record in collector.collect(jobs):
            if record.failure is not None:
                raise SystemExit(f"episode {record.id} failed: {record.failure.reason}")
            turns += len(record.calls)
        return time.process_time() - started, turns


async def reasoning_gym(block: Block, examples: Sequence[Example]) -> Spent:
    """reasoning-gym's own loop: a question, an answer, its score."""
    import reasoning_gym

    entries = reasoning_gym.create_dataset(
        block["task"], **(block.get("config") or {}), size=len(examples), seed=1
    )
    started = time.process_time()
    for entry in entries:
        entries.score_answer(answer="1", entry=entry)
    return time.process_time() - started, len(examples)


async def textarena(block: Block, examples: Sequence[Example]) -> Spent:
    """Games as TextArena's own examples play them."""
    import textarena

    started, turns = time.process_time(), 0
    for example in examples:
        env, over = textarena.make(block["id"]), False
        env.reset(num_players=len(block["seats"]), seed=example.inputs["seed"])
        while not over:
            _, observation = env.get_observation()
            over, _ = env.step(action=legal_answer([{"content": observation}])["content"])
            turns += 1
        env.close()
    return time.process_time() - started, turns


async def mcp(block: Block, examples: Sequence[Example]) -> Spent:
    """The calls of the tool by the bare `mcp` client: one for each two answers of the model."""
    from mcp import Client, StdioServerParameters, stdio_client

    parameters = StdioServerParameters(command=sys.executable, args=block["args"], cwd=block["cwd"])
    async with Client(stdio_client(parameters), cache=None) as client:
        started = time.process_time()
        for example in examples:
            asked = legal_answer([{"content": example.inputs["question"]}])["tool_calls"][0]["function"]
            await client.call_tool(asked["name"], json.loads(asked["arguments"]))
        return time.process_time() - started, 2 * len(examples)


async def verifiers(block: Block, examples: Sequence[Example]) -> Spent:
    """verifiers' own episodes, with the chat loop that the workflow has and a client that answers at once."""
    import httpx
    import verifiers.v1 as vf

    from etude.integrations.verifiers.client import EpisodeClientConfig
    from etude.integrations.verifiers.environment import open_environment
    from etude.integrations.verifiers.serving import serving
    from etude.integrations.verifiers.tasks import Tasks

    turns = 0

    async def send(path: str, body: Any, agent: str) -> httpx.Response:
        nonlocal turns
        turns += 1
        choice = {"index": 0, "finish_reason": "stop", "delta": {"role": "assistant", "content": "1"}}
        usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
        chunk = {"id": "1", "object": "chat.completion.chunk", "created": 0, "model": "m", "usage": usage}
        events = (json.dumps(chunk | {"choices": [choice]}), "[DONE]")
        content = "".join(f"data: {event}\n\n" for event in events).encode()
        return httpx.Response(200, stream=httpx.ByteStream(content))

    env = open_environment(block["environment"], {})
    tasks: Any = Tasks(env.taskset)
    client = EpisodeClientConfig.of(SimpleNamespace(send=send))  # type: ignore[arg-type]
    async with serving(env):
        started = time.process_time()
        for example in examples:
            played = await env.run_episode(tasks.of(example), vf.ModelContext(model="m", client=client))
            if not env.complete(played):
                raise SystemExit(f"verifiers' own episode of {example.id} failed")
        return time.process_time() - started, turns


def of_function(workflow: Any) -> OwnLoop:
    """The workflow's own function, with an episode that answers and records nothing."""

    async def loop(block: Block, examples: Sequence[Example]) -> Spent:
        started, turns = time.process_time(), 0

        async def chat(messages: Sequence[Message], model: str | None = None) -> Any:
            nonlocal turns
            turns += 1
            return SimpleNamespace(text=legal_answer(messages)["content"])

        for example in examples:
            await workflow.fn(example, SimpleNamespace(chat=chat, note=lambda text: None))
        return time.process_time() - started, turns

    return loop


OWN_LOOPS: dict[str, OwnLoop] = {
    "reasoning_gym": reasoning_gym,
    "textarena": textarena,
    "mcp": mcp,
    "verifiers": verifiers,
}
"""The environments' own loops, by the type of the workflow."""


async def measure(file: Path, episodes: int = EPISODES, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds of CPU time of a turn in the own loop and in Etude, and their difference."""
    data = dict(read_document(file).data)
    sys.path.insert(0, str(file.parent.resolve()))
    stub = {"_type": "openai", "base_url": "http://127.0.0.1:1/v1"}
    data = {key: data[key] for key in ("workflow", "eval") if key in data} | {
        "llms": {name: stub | {"model_name": name} for name in data["llms"]}
    }
    block = data["workflow"] if isinstance(data["workflow"], dict) else {}
    if block.get("_type") == "mcp":
        block = data["workflow"] = block | {"cwd": str(file.parent.resolve())}
    config = parse_config(data)
    alone: list[float] = []
    here: list[float] = []
    async with Builder(config) as builder:
        examples = (await builder.get_dataset()).examples()[:episodes]
        own = OWN_LOOPS.get(block.get("_type", "")) or of_function(await builder.get_workflow())
        for _ in range(rounds + 1):
            for costs, (seconds, turns) in (
                (alone, await own(block, examples)),
                (here, await in_etude(config, examples, builder)),
            ):
                costs.append(1000 * seconds / turns)
    # The first round imports what it needs.
    medians = statistics.median(alone[1:]), statistics.median(here[1:])
    return {"own": medians[0], "etude": medians[1], "overhead": medians[1] - medians[0]}


def measured(file: Path, quick: bool) -> dict[str, float]:
    """`measure` in a process of its own: two configs may have modules of one name."""
    arguments = [sys.executable, __file__, str(file), "--json", *(["--quick"] if quick else [])]
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr}")
    costs: dict[str, float] = json.loads(done.stdout)
    return costs


def main() -> None:
    """Measure the turns of the config that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path, help="a config file")
    parser.add_argument("--quick", action="store_true", help="20 episodes once")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    given = parser.parse_args()
    costs = asyncio.run(measure(given.config, *((20, 1) if given.quick else ())))
    if given.json:
        print(json.dumps(costs))
    else:
        print(", ".join(f"{name} {cost:.3f} ms" for name, cost in costs.items()))


if __name__ == "__main__":
    main()
