"""All clients against an episode's endpoint and a server, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.call import Call
from etude.core.episode import Example
from etude.engines.embedded import EmbeddedEngine
from etude.models.policy import Policy
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.episode import Episode
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal
from tests.clients.drive import MODULES, Feature, Target, encode, load_client
from tests.clients.model import PLAIN, TRANSCRIPTS, build_model
from tests.forked import programs
from tests.server.process import ServerProcess

ROOT = Path(__file__).parents[2]
USUAL = ("openai_sdk", "anthropic_sdk")
"""The clients of every test run."""
SIDES = ("endpoint", "server")
MOST_TOKENS = 256
NODE = Path(__file__).parent / "node"
_AT_ONCE = 2
_SECONDS = 240.0

QUIET = {"HF_HUB_OFFLINE": "1", "LANGSMITH_TRACING": "false", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
"""Keeps the clients off the network."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a feature of a client went at the endpoint or the server."""

    error: str | None
    calls: tuple[Call, ...] = ()
    """At the endpoint: what was recorded."""


Outcomes = Mapping[tuple[str, str, str], Outcome]
"""By module, feature and side."""


def is_installed(module: str) -> bool:
    """Whether a client that is optional can be driven here."""
    return (NODE / "node_modules" / load_client(module).package).is_dir()


def features(modules: Sequence[str] = MODULES) -> Iterator[tuple[str, str, Feature]]:
    """The features of clients: the module, the function's name, the feature."""
    for module in modules:
        for name, feature in load_client(module).features.items():
            yield module, name, feature


def run_matrix(folder: Path, modules: Sequence[str] = MODULES) -> Outcomes:
    """Run the features of the clients at both; `folder` is for the model and the server."""
    build_model(folder / "model", *((PLAIN, 90) if modules == USUAL else (TRANSCRIPTS, 150)))
    (folder / "server").mkdir()
    with ServerProcess(folder / "model", folder / "server", "--name", "tiny") as server:
        return asyncio.run(
            _run(folder, Target(f"{server.address}/v1", "none", "tiny", takes_any_name=False), modules)
        )


async def _run(folder: Path, server: Target, modules: Sequence[str]) -> Outcomes:
    wanted = [(module, name) for module, name, _ in features(modules)]
    open_episodes = {key: asyncio.get_running_loop().create_future() for key in wanted}
    over = {module: asyncio.Event() for module in modules}

    async def workflow(example: Example, episode: Episode) -> str:
        module, name = example.inputs["module"], example.inputs["name"]
        endpoint = episode.endpoint
        open_episodes[module, name].set_result(Target(endpoint.base_url, endpoint.api_key, "policy"))
        await over[module].wait()
        return "over"

    jobs = [
        EpisodeJob(f"{module}/{name}", Example(f"{module}/{name}", {"module": module, "name": name}))
        for module, name in wanted
    ]
    engine = EmbeddedEngine(Policy.load(folder / "model", device="cpu"), max_tokens=MOST_TOKENS)
    with Journal(folder / "journal.db") as journal:
        limits = Limits(max_concurrency=len(jobs), timeout=_SECONDS)
        collector = Collector(as_workflow(workflow), {"policy": engine}, journal, limits=limits)
        driving = asyncio.create_task(_drive(modules, open_episodes, server, over))
        async with aclosing(collector.collect(jobs)) as records:
            calls = {record.id: record.calls async for record in records}
        outcomes = await driving
    await engine.close()
    return {
        (module, name, side): Outcome(error, calls[f"{module}/{name}"] if side == "endpoint" else ())
        for (module, name, side), error in outcomes.items()
    }


async def _drive(
    modules: Sequence[str],
    open_episodes: Mapping[tuple[str, str], asyncio.Future[Target]],
    server: Target,
    over: Mapping[str, asyncio.Event],
) -> dict[tuple[str, str, str], str | None]:
    """Run the clients' processes, a few at once; the errors."""
    turns = asyncio.Semaphore(_AT_ONCE)
    outcomes: dict[tuple[str, str, str], str | None] = {}

    async def drive(module: str) -> None:
        try:
            async with turns:
                targets = {
                    name: {"endpoint": await opened, "server": server}
                    for (of, name), opened in open_episodes.items()
                    if of == module
                }
                ended, lines = await _process(module, targets)
            for line in lines:
                outcomes[module, line["feature"], line["side"]] = line["error"]
            for name in targets:
                for side in SIDES:
                    outcomes.setdefault((module, name, side), f"the process ended before: {ended}")
        finally:
            over[module].set()

    await asyncio.gather(*map(drive, modules))
    return outcomes


async def _process(
    module: str, targets: Mapping[str, Mapping[str, Target]]
) -> tuple[str, list[dict[str, Any]]]:
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    process = await asyncio.create_subprocess_exec(
        str(programs() / "python"),
        "-m",
        "tests.clients.drive",
        module,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | QUIET | {"PYTHONPATH": search},
        cwd=ROOT,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(encode(targets).encode()), _SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
    lines = [json.loads(line) for line in output.splitlines()]
    return f"exit code {process.returncode}, {errors.decode()[-2000:]}", lines
