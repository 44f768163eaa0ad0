"""Episodes and plays written by hand: conversations whose tokens are characters, and scored plays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.algorithms.plays import by_agent
from etude.algorithms.samples import ScoredEpisode, targeted_calls, without_retries
from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import WORKFLOW, EpisodeRecord, Event, Example
from etude.core.message import Message
from etude.protocols import Protocol
from etude.store.journal import Journal
from tests.protocols.games import play_record
from tests.support import ScriptedEngine


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(character) for character in text)


def call(
    index: int,
    messages: Sequence[Message],
    reply: Message,
    prompt: str | None,
    completion: str | None,
    *,
    function: str = WORKFLOW,
    model: str = "policy",
    drifted: bool = False,
) -> Call:
    """A call whose tokens are the characters of `prompt` and `completion`; None: an engine without tokens."""
    sampled = None if completion is None else ids(completion)
    return Call(
        index=index,
        function=function,
        model=model,
        request=ChatRequest(messages=tuple(messages)),
        completion=Completion(
            message=reply,
            prompt_ids=None if prompt is None else ids(prompt),
            completion_ids=sampled,
            logprobs=None if sampled is None else tuple(-token / 1000 for token in sampled),
            drifted=drifted,
        ),
    )


def conversation(*turns: str, start: int = 0, function: str = WORKFLOW, model: str = "policy") -> list[Call]:
    """Calls of one conversation: `user, reply, user, reply, …`; every prompt extends the tokens before."""
    messages: list[Message] = []
    tokens = ""
    calls: list[Call] = []
    for said, replied in zip(turns[::2], turns[1::2], strict=True):
        messages.append({"role": "user", "content": said})
        reply = {"role": "assistant", "content": replied}
        prompt = f"{tokens}<{said}>"
        calls.append(
            call(start + len(calls), messages, reply, prompt, f"{replied}.", function=function, model=model)
        )
        messages.append(reply)
        tokens = f"{prompt}{replied}."
    return calls


def episode(
    calls: Sequence[Call], *, generation: int = 0, example: str = "e", events: Sequence[Event] = ()
) -> EpisodeRecord:
    return EpisodeRecord(
        id=f"train/1/{example}/{generation}",
        example=Example(example),
        generation=generation,
        calls=tuple(calls),
        events=tuple(events),
        output="",
    )


def make_scored(reward: float, *turns: str, generation: int = 0, example: str = "e") -> ScoredEpisode:
    """A scored episode of one conversation."""
    record = episode(conversation(*turns), generation=generation, example=example)
    return ScoredEpisode(record, reward, targeted_calls(record, {WORKFLOW}, "policy"))


def group(*rewards_and_replies: tuple[float, str]) -> list[ScoredEpisode]:
    """Single-turn siblings: `(reward, reply)` each."""
    return [
        make_scored(reward, "question", reply, generation=generation)
        for generation, (reward, reply) in enumerate(rewards_and_replies)
    ]


EVERY = ("*",)


async def play_out(folder: Path, protocol: Protocol, answers: Any, **settings: Any) -> EpisodeRecord:
    """The episode of a play in which models answer in that order, or as a function says."""
    engine = answers if isinstance(answers, ScriptedEngine) else ScriptedEngine(answers)
    with Journal(folder / f"{settings.get('generation', 0)}.db") as journal:
        record = await play_record(protocol, engine, journal, **settings)
    assert record.failure is None, record.failure
    return record


def scored_play(record: EpisodeRecord, reward: float = 0.0) -> ScoredEpisode:
    """The episode as a collection has it."""
    return ScoredEpisode(record, reward, targeted_calls(without_retries(record), EVERY, "policy"))


def agent_part(agent: str, *records: EpisodeRecord) -> list[ScoredEpisode]:
    """One agent's part of the episodes."""
    groups = by_agent([scored_play(record) for record in records])
    return next((group for group in groups if group[0].agent == agent), [])
