"""Scored episodes: what the algorithms work on, and what a collection says about itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.algorithms.branches import Branch
from etude.core.episode import EpisodeRecord


@dataclass(frozen=True, slots=True)
class ScoredEpisode:
    """An episode with its reward, and the branches of it that are trained on."""

    episode: EpisodeRecord
    reward: float
    branches: tuple[Branch, ...]
    reasoning: Any = None
    agent: str | None = None
    """Whose reward and branches these are, where the agents of an episode are told apart."""


Group = Sequence[ScoredEpisode]
"""The scored episodes of one example."""


@dataclass(slots=True)
class Tally:
    """Counts of one collection. Nothing that was left out goes uncounted."""

    episodes: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    """Failed episodes by kind, and failed scores as `score:<evaluator>`."""
    rewards: list[float] = field(default_factory=list)
    """Of every scored episode, whether or not it is trained on."""
    unscored: int = 0
    """Episodes without a reward."""
    untargeted: int = 0
    """Scored episodes without a call to the target functions and model."""
    branches: int = 0
    drifted: int = 0
    """Branches that began because a prompt repeated a conversation in other tokens."""
    drift: Counter[str] = field(default_factory=Counter)
    """The same by what the template writes differently: the role and kind of a message, or the tools."""
    completion_tokens: int = 0
    retried: int = 0
    """Answers in a protocol that could not be used and were asked for again; they are not trained on."""
    reward_groups: dict[str, int] = field(default_factory=dict)
    """Examples whose episodes are `compared`, and of them the `flat` ones, where all have one reward."""
    left_out: Counter[str] = field(default_factory=Counter)
    """What the algorithm left out, by reason."""

    def facts(self) -> dict[str, Any]:
        """The counts as JSON."""
        return {
            "episodes": self.episodes,
            "failures": dict(self.failures),
            "rewards": list(self.rewards),
            "unscored": self.unscored,
            "untargeted": self.untargeted,
            "branches": self.branches,
            "drifted": self.drifted,
            "drift": dict(self.drift),
            "retried": self.retried,
            "completion_tokens": self.completion_tokens,
            "left_out": dict(self.left_out),
            "reward_groups": dict(self.reward_groups),
        }


def reward_groups(groups: Iterable[Sequence[float]]) -> dict[str, int]:
    """In how many groups rewards can be `compared`, and in how many they are all equal: `flat`."""
    compared = [rewards for rewards in groups if len(rewards) > 1]
    return {"compared": len(compared), "flat": sum(min(one) == max(one) for one in compared)}


def rewards_of(group: Group) -> list[float]:
    """The rewards of a group's episodes."""
    return [scored.reward for scored in group]


def mean_of(group: Group) -> float:
    """The mean reward of a group that is not empty."""
    return math.fsum(rewards_of(group)) / len(group)
