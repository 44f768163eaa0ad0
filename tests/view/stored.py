"""Runs as the store keeps them, written by its own code: small, of any shape, and without a model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.call import Call, ChatRequest, Completion, Usage
from etude.core.episode import EpisodeRecord, Event, Example, Failure
from etude.core.history import EpochEntry, ValidationEntry
from etude.core.message import Message
from etude.store.episodes import write_episode
from etude.store.journal import ModelLog
from etude.store.run_folder import RunFolder
from tests.show.histories import epoch

CONFIG_YAML = """\
llms: {policy: {_type: local, model: none/such}}
eval: {evaluators: {correct: {_type: exact}, style: {_type: exact}}}
trajectory_builders: {builder: {_type: grpo}}
trainer_adapters: {adapter: {_type: local}}
finetuning:
  num_epochs: 3
  target_model: policy
  trajectory_builder: builder
  trainer_adapter: adapter
  reward_function: {name: correct}
"""


@dataclass(frozen=True)
class Told:
    """An episode to be stored."""

    id: str
    answers: Sequence[Message] = ({"role": "assistant", "content": "four"},)
    asked: str = "two and two?"
    scores: Mapping[str, Any] | None = None
    """By evaluator: a number, or all that is stored of a score."""
    failure: Failure | None = None
    version: int = 0
    finish_reason: str = "stop"
    drifted: bool = False
    has_ids: bool = True
    function: str = "<workflow>"
    events: tuple[Event, ...] = ()
    retried: Mapping[str, int] | None = None

    @property
    def example(self) -> str:
        """Its example's id."""
        return re.sub(r"^(eval|\w+/\d+)/", "", self.id).rpartition("/")[0]


def make_calls(told: Told) -> list[Call]:
    """The calls of an episode, each going on from the one before."""
    messages: tuple[Message, ...] = ({"role": "user", "content": told.asked},)
    calls, ids = [], (1, 2, 3)
    for index, answer in enumerate(told.answers):
        sampled = tuple(range(10 + index, 14 + index))
        completion = Completion(
            message=answer,
            finish_reason=told.finish_reason,
            prompt_ids=ids if told.has_ids else None,
            completion_ids=sampled if told.has_ids else None,
            logprobs=(-0.1, -0.7, -0.01, -2.5) if told.has_ids else None,
            usage=Usage(len(ids), len(sampled)),
            model_version=told.version,
            drifted=told.drifted and index > 0,
            fault="the tool's answer" if told.drifted and index > 0 else "",
        )
        request = ChatRequest(messages)
        calls.append(Call(index, told.function, "policy", request, completion, retried=told.retried or {}))
        messages = (*messages, answer, {"role": "user", "content": "go on"})
        ids = (*ids, *sampled, 4, 5)
    return calls


def make_record(told: Told) -> EpisodeRecord:
    """The record of an episode."""
    return EpisodeRecord(
        id=told.id,
        example=Example(told.example, {"question": told.asked}, expected="four"),
        generation=int(told.id.rpartition("/")[2]),
        calls=tuple(make_calls(told)),
        events=told.events,
        output=None if told.failure else "four",
        failure=told.failure,
        seconds=1.5,
    )


def epoch_entry(number: int, reward: float = 0.5, **metrics: Any) -> EpochEntry:
    """A finished epoch."""
    told: dict[str, Any] = {"reward_low": reward - 0.1, "reward_high": reward + 0.1, "num_scored": 8}
    told |= {"episodes": 8, "failures": {}, "training": {"loss": 1.0 / number, "sampled_kl": 0.01}}
    return epoch(number - 1, reward, **told | metrics)


def store_run(
    root: Path,
    name: str = "r",
    episodes: Sequence[Told] = (),
    epochs: Sequence[EpochEntry] = (),
    validations: Sequence[ValidationEntry] = (),
    config: str = CONFIG_YAML,
) -> Path:
    """Write a run folder; its path."""

    async def write() -> None:
        with RunFolder.create(root, name, config=config) as run:
            for told in episodes:
                await write_episode(run.journal, make_record(told))
                for evaluator, score in ({"correct": 1.0} if told.scores is None else told.scores).items():
                    whole = {"score": score, "reasoning": None, "error": None}
                    stored = score if isinstance(score, dict) else whole
                    await run.journal.put(f"{told.id}/score/{evaluator}", stored)
            log = ModelLog(run.journal)
            for entry in (*epochs, *validations):
                await log.add(entry)

    asyncio.run(write())
    return root / name
