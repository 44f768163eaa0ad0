"""Candidates: several answers to one prompt, each with a value, within one episode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etude.algorithms.branches import Branch
from etude.algorithms.plays import is_play, tree_of
from etude.algorithms.preferences import preference
from etude.algorithms.scored import ScoredEpisode
from etude.core.call import Call
from etude.core.message import message_key
from etude.core.trajectory import Trajectory
from etude.protocols.tree import choices


@dataclass(frozen=True, slots=True)
class Candidate:
    """One answer."""

    call: Call
    value: float
    """What it was worth to the agent that gave it."""

    @property
    def branch(self) -> Branch:
        """The answer as a branch of its own."""
        return Branch(0, (self.call,))


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt of an episode, and the answers to it."""

    scored: ScoredEpisode
    index: int
    """Order within the episode, and for its agent, from 0."""
    candidates: tuple[Candidate, ...]
    bounds: tuple[float, float] | None = None
    """The least and the most that the agent can earn in the play; None outside of protocols."""

    def facts(self) -> dict[str, Any]:
        """The metadata of what is made of the turn."""
        episode = self.scored.episode
        facts: dict[str, Any] = {"id": episode.example.id, "episode": episode.id, "turn": self.index}
        return facts if self.scored.agent is None else facts | {"agent": self.scored.agent}


def turns_of(scored: ScoredEpisode) -> Iterator[Turn]:
    """The prompts of an episode that were answered more than once.

    In a protocol these are the choices of the episode's agent, and an answer's value is that of its
    nodes. Elsewhere they are calls with equal prompts, and the value is the step reward after the call;
    one that got none is no candidate.
    """
    found = _in_play(scored) if is_play(scored.episode) else _in_calls(scored)
    return (turn for turn in found if len(turn.candidates) > 1)


def pair_of(turn: Turn, better: Candidate, worse: Candidate) -> Trajectory | None:
    """The preference of one candidate over another; None when there is no difference to learn from.

    Its reward is the difference of their values.
    """
    item = preference(better.branch, worse.branch)
    if item is None:
        return None
    facts = {
        "chosen_reward": better.value,
        "rejected_reward": worse.value,
        "temperature": better.call.request.sampling.temperature,
    }
    return Trajectory(episode=[item], reward=better.value - worse.value, metadata=turn.facts() | facts)


def pair_rewards(trajectories: Sequence[Trajectory]) -> list[float]:
    """The values of all candidates that are in one of the pairs."""
    facts = [trajectory.metadata or {} for trajectory in trajectories]
    return [one[side] for one in facts for side in ("chosen_reward", "rejected_reward")]


def _in_play(scored: ScoredEpisode) -> Iterator[Turn]:
    tree = tree_of(scored.episode)
    calls = {call.index: call for branch in scored.branches for call in branch.calls}
    for index, choice in enumerate(choices(tree, scored.agent)):
        candidates = tuple(
            Candidate(calls[answer.call], answer.value) for answer in choice.answers if answer.call in calls
        )
        yield Turn(scored, index, candidates, tree.bounds[choice.agent])


def _in_calls(scored: ScoredEpisode) -> Iterator[Turn]:
    values: dict[int, list[float]] = {}
    for event in scored.episode.events:
        if event.kind == "step_reward" and event.value is not None:
            values.setdefault(event.after_call, []).append(event.value)
    places: dict[Any, list[Candidate]] = {}
    for branch in scored.branches:
        for call in branch.calls:
            if call.index in values:
                candidate = Candidate(call, math.fsum(values[call.index]))
                places.setdefault(_prompt(call), []).append(candidate)
    for index, candidates in enumerate(places.values()):
        yield Turn(scored, index, tuple(candidates))


def _prompt(call: Call) -> Any:
    """What makes two prompts the same: the tokens, where they are known."""
    completion = call.completion
    if completion is not None and completion.prompt_ids is not None:
        return completion.prompt_ids
    return tuple(message_key(message) for message in call.request.messages)
