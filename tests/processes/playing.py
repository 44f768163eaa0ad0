"""Evaluations of the fragile agent, in this process and in runners."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.config.load import parse_config
from etude.config.schema import Config
from etude.core.episode import EpisodeRecord, Example
from etude.core.evaluation import EvaluationRunOutput
from etude.core.interfaces import Engine
from etude.engines.programs import Command, python_command
from etude.processes import link
from etude.runtime import Runtime, open_runtime
from etude.store.episodes import iter_episodes
from etude.store.run_folder import RunFolder
from tests.forked import programs

_LINE = re.compile(r"^\S+:\d+: ")


def config_with(llm: dict[str, Any] | None = None, workflow: str = "play", **general: Any) -> Config:
    """A config of the agent; the engine of its model is given."""
    unused = {
        "_type": "openai",
        "model_name": "none",
        "base_url": "http://127.0.0.1:9",
        "api_key": "sk-$HOME",
    }
    return parse_config(
        {
            "llms": {"policy": llm or unused},
            "workflow": f"tests.processes.fragile:{workflow}",
            "eval": {
                "general": {"dataset": {"_type": "seeds"}, **general},
                "evaluators": {"length": "tests.processes.fragile:length"},
            },
            "finetuning": {"error_budget": 1.0, "seed": 7},
        }
    )


def fork_runners(set: Callable[..., None] = setattr) -> None:
    """Have the runners of this process forked from one that has imported all that they need."""

    def fork_command(module: str, said: str) -> Command:
        command = python_command(module, said)
        return replace(command, words=(str(programs() / "python"), *command.words[1:]))

    set(link, "python_command", fork_command)


def examples(*deeds: str) -> list[Example]:
    """An example for each deed."""
    return [
        Example(f"{index}-{deed}", {"question": f"What is {index}?", "do": deed})
        for index, deed in enumerate(deeds)
    ]


@asynccontextmanager
async def open_run(folder: Path, config: Config, engine: Engine | None) -> AsyncIterator[Runtime]:
    """The runtime of a new run folder, or of one that is there."""
    there = (folder / "run.db").exists()
    with RunFolder.open(folder) if there else RunFolder.create(folder.parent, folder.name) as run:
        async with open_runtime(config, run, engines={"policy": engine} if engine else None) as runtime:
            yield runtime


async def evaluate(
    folder: Path, config: Config, engine: Engine | None, work: list[Example], **asked: Any
) -> EvaluationRunOutput:
    """An evaluation in a run folder."""
    async with open_run(folder, config, engine) as runtime:
        return await runtime.evaluation.run(work, phase="eval", **asked)


def read_run(folder: Path) -> tuple[dict[str, Any], list[EpisodeRecord]]:
    """All that the journal holds, and the episodes, without how long they took.

    And the steps without the lines of failures: an error of the tests' engines is raised in code of a user's.
    """
    with RunFolder.read(folder) as run:
        # Without the run's name and the digest of its examples, which are text.
        steps = {key: data for key, data in run.journal.scan() if isinstance(data, dict)}
        records = [replace(record, seconds=0.0) for record in iter_episodes(run.journal)]
    for data in steps.values():
        if "seconds" in data:
            data["seconds"] = 0
        data.pop("began", None)
        for call in data["calls"] if "episode" in data else ():
            if isinstance(call, dict):  # It has failed.
                call["seconds"] = call["began"] = 0
        for event in data.get("events", ()):
            if "tool" in event:
                event["tool"]["seconds"] = event["tool"]["began"] = 0
        if data.get("failure"):
            data["failure"][1] = _LINE.sub("", data["failure"][1])
    return steps, records
