"""Playing a protocol: as the workflow of a run, or once outside of any run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from etude.config.nearest import alternatives
from etude.core.call import Sampling
from etude.core.errors import EpisodeError, RequestError
from etude.core.example import Example
from etude.core.interfaces import Engine
from etude.core.keys import fold
from etude.protocols.growing import FinalAnswer, Play, Question, Width, Widths, wanted_widths
from etude.protocols.protocol import Protocol
from etude.protocols.rules import Turn
from etude.protocols.scenario import Act, Malformed, Scenario
from etude.protocols.tree import EpisodeTree, Rejected
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.episode import Episode
from etude.rollout.reply import Reply
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal
from etude.wire.sampling import change_sampling

T = TypeVar("T")

RETRIES = 3
"""How often a malformed answer is asked for again, by default."""


@dataclass(frozen=True, repr=False)
class ProtocolWorkflow:
    """A workflow that plays a protocol on an example; its output is the episode tree as JSON.

    The calls of an agent are those of the function with its name. Raises RequestError for agents that
    the protocol does not have, and for impossible widths or sampling.
    """

    protocol: Protocol
    scenario: Scenario
    policies: Mapping[str, str | None] | str | None = None
    """The entry of `llms` that each agent samples from: by agent, one for all, or the default model."""
    widths: Widths | Width | Mapping[str, Width] = 1
    """How many answers are sampled for each turn."""
    retries: int = RETRIES
    """How often a malformed answer is asked for again before it counts."""
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Sampling parameters by agent, over those of its model."""
    seed: int = 0
    """Of the schedule and the order of channels, where a protocol draws them."""

    def __post_init__(self) -> None:
        """Check what can be checked before the first call."""
        agents = self.protocol.agents
        widths = Widths.of(self.widths)
        widths.check_agents(agents)
        object.__setattr__(self, "widths", widths)
        for setting, by_agent in (("policies", self.policies), ("sampling", self.sampling)):
            for agent in by_agent if isinstance(by_agent, Mapping) else ():
                if agent not in agents:
                    where = f"protocol '{self.protocol.name}' has no agent '{agent}'"
                    raise RequestError(f"{setting}: {where}" + alternatives(agent, agents))
        missing = [agent for agent in agents if self.models.get(agent, "") is None]
        if missing and isinstance(self.policies, Mapping):
            raise RequestError(f"policies: no model for the agent '{missing[0]}'; name an entry of `llms`")
        if self.retries < 0:
            raise RequestError(f"retries must be at least 0, found {self.retries}")
        if hasattr(self.scenario, "check_protocol"):
            self.scenario.check_protocol(self.protocol)
        for changes in self.sampling.values():
            change_sampling(Sampling(), changes)

    async def __call__(self, example: Example, episode: Episode) -> Any:
        """Play once. Raises as `Play` does, and RequestError for a `branching` of unknown agents."""
        widths = wanted_widths.get() or Widths.of(self.widths)
        widths.check_agents(self.protocol.agents)
        # The episodes of an example play the same schedule, to be compared.
        group = episode.id.removesuffix(f"/{episode.generation}")
        key = fold(self.seed, group, "play")
        play = Play(self.protocol, self.scenario, example, _Asker(self, episode), key, widths)
        return (await play.grow()).to_json()

    def __repr__(self) -> str:
        return f"<protocol {self.protocol.name}>"

    @property
    def models(self) -> dict[str, str | None]:
        """The entry of `llms` that each agent samples from; None for the default model."""
        policies = self.policies
        if isinstance(policies, Mapping):
            return {agent: policies.get(agent) for agent in self.protocol.agents}
        return dict.fromkeys(self.protocol.agents, policies)


async def play(
    protocol: Protocol,
    scenario: Scenario,
    policies: Mapping[str, Engine],
    example: Example,
    *,
    widths: Widths | Width | Mapping[str, Width] = 1,
    retries: int = RETRIES,
    seed: int = 0,
    sampling: Mapping[str, Mapping[str, Any]] | None = None,
) -> EpisodeTree:
    """Play a protocol on one example, each agent with its engine. Nothing is kept.

    Width 1 is a rollout, k branches at every answer, `[k, 1]` at the first; by agent where widths are a
    mapping. For many examples, or a run that can be resumed, hand a `ProtocolWorkflow` to a `Collector`.
    Raises RequestError for what does not fit the protocol, EpisodeError when the play failed.
    """
    missing = [agent for agent in protocol.agents if agent not in policies]
    if missing:
        raise RequestError(f"policies: no engine for the agent '{missing[0]}' of '{protocol.name}'")
    names = {agent: agent for agent in policies}
    workflow = as_workflow(ProtocolWorkflow(protocol, scenario, names, widths, retries, sampling or {}, seed))
    limits = Limits(max_concurrency=1, timeout=None, max_calls=None)
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "play.db") as journal:
        models = {agent: Sampling() for agent in policies}
        collector = Collector(workflow, policies, journal, seed=seed, limits=limits, sampling=models)
        record = await collector.run(EpisodeJob(f"play/{example.id}/0", example))
    if record.failure is not None:
        raise EpisodeError(f"the play on example '{example.id}' failed: {record.failure.reason}")
    return EpisodeTree.from_json(record.output)


class _Asker:
    """Asks the agents' models within one episode, of which it makes all calls."""

    def __init__(self, workflow: ProtocolWorkflow, episode: Episode) -> None:
        self._workflow = workflow
        self._episode = episode
        self._models = workflow.models
        self._calls = 0

    async def ask(self, questions: Sequence[Question]) -> list[FinalAnswer]:
        """The answers to all questions, asked at the same time.

        Malformed answers are asked again together, once all answers are in: so the order of the calls
        follows from the answers alone. Raises what `Episode.chat` raises, once every call has ended, and
        EpisodeError for an act that the turn does not allow.
        """
        answers: dict[int, FinalAnswer] = {}
        rejected: dict[int, tuple[Rejected, ...]] = {}
        for retries_left in range(self._workflow.retries, -1, -1):
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
        sampling = self._workflow.sampling.get(agent, {})
        # Nothing is awaited between here and the recorder's count, which therefore is the same.
        call = self._calls
        self._calls += 1
        with self._episode.function(agent):
            return call, await self._episode.chat(question.prompt, model=self._models.get(agent), **sampling)

    def _act(self, text: str, turn: Turn) -> Act | Malformed:
        act = self._workflow.scenario.parse(text, turn)
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
