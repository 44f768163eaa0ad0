"""Asking the models of a play, and asking again where an answer cannot be used."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from etude.core.errors import EpisodeError
from etude.core.message import Message
from etude.protocols.rules import Turn
from etude.protocols.scenario import Act, Malformed, Scenario
from etude.protocols.tree import Rejected
from etude.rollout.episode import Episode
from etude.rollout.reply import Reply

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to the agent of a turn."""

    turn: Turn
    prompt: Sequence[Message]


@dataclass(frozen=True, slots=True)
class FinalAnswer:
    """The answer that counts, well-formed or not, and those before it that did not."""

    call: int
    text: str
    act: Act | Malformed
    truncated: bool
    rejected: tuple[Rejected, ...]


class Asker:
    """Asks the agents' models within one episode, of which it makes all calls."""

    def __init__(
        self,
        episode: Episode,
        scenario: Scenario,
        models: Mapping[str, str | None],
        *,
        retries: int,
        sampling: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """`models` and `sampling` are by agent; `retries` is how often a malformed answer is asked again."""
        self._episode = episode
        self._scenario = scenario
        self._models = models
        self._retries = retries
        self._sampling = sampling
        self._calls = 0

    async def ask(self, questions: Sequence[Question]) -> list[FinalAnswer]:
        """The answers to all questions, asked at the same time.

        Malformed answers are asked again together, once all answers are in: so the order of the calls
        follows from the answers alone. Raises what `Episode.chat` raises, once every call has ended, and
        EpisodeError for an act that the turn does not allow.
        """
        answers: dict[int, FinalAnswer] = {}
        rejected: dict[int, tuple[Rejected, ...]] = {}
        for retries_left in range(self._retries, -1, -1):
            waiting = [index for index in range(len(questions)) if index not in answers]
            replies = await _all_of(self._chat(questions[index]) for index in waiting)
            for index, (call, reply) in zip(waiting, replies, strict=True):
                act = self._act(reply.text, questions[index].turn)
                before = rejected.get(index, ())
                if isinstance(act, Malformed) and retries_left:
                    rejected[index] = (*before, Rejected(call, act.reason))
                else:
                    cut_off = reply.finish_reason == "length"
                    answers[index] = FinalAnswer(call, reply.text, act, cut_off, before)
        return [answers[index] for index in range(len(questions))]

    async def _chat(self, question: Question) -> tuple[int, Reply]:
        """The index of the call, and its answer."""
        agent = question.turn.agent
        # Nothing is awaited between here and the recorder's count, which therefore is the same.
        call = self._calls
        self._calls += 1
        with self._episode.function(agent):
            reply = await self._episode.chat(
                question.prompt, model=self._models.get(agent), **self._sampling.get(agent, {})
            )
        return call, reply

    def _act(self, text: str, turn: Turn) -> Act | Malformed:
        act = self._scenario.parse(text, turn)
        if isinstance(act, Malformed):
            return act
        stray = [channel for channel in act.messages if channel not in turn.writes]
        if stray:
            raise EpisodeError(f"the scenario's parse has '{turn.agent}' write on '{stray[0]}' out of turn")
        if act.decision is None:
            return Malformed("no decision in a turn that must decide") if turn.decide == "must" else act
        if turn.decide == "no":
            return Malformed("a decision in a turn that may not decide")
        if not -1 <= act.decision <= 1:
            raise EpisodeError(f"the scenario's parse has a decision of {act.decision}, outside [-1, 1]")
        return act


async def _all_of(calls: Iterable[Awaitable[T]]) -> list[T]:
    """The results of all calls. An error is raised once the others have ended: what they cost is kept."""
    results: list[T] = []
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    return results
