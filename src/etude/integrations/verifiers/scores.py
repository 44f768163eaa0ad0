"""The rewards and metrics of an environment as scores of an episode."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from etude.core.errors import EpisodeError

REWARD = "reward"
"""The score that is an environment's reward: the weighted sum of what its tasks and its judges give."""


@dataclass(frozen=True, slots=True)
class AgentScores:
    """The numbers that one run of one agent was given."""

    agent: str
    rewards: Mapping[str, tuple[float, float] | None]
    """By name, each with its weight; None where its function did not come to run."""
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """The weighted sum; None for an agent that is given no rewards."""
        given = [each for each in self.rewards.values() if each is not None]
        return math.fsum(value * weight for value, weight in given) if given else None

    @property
    def missing(self) -> list[str]:
        """Rewards that there should be."""
        return [name for name, value in self.rewards.items() if value is None]


@dataclass(frozen=True, slots=True)
class Score:
    """A number for `episode.score`."""

    name: str
    value: float
    agent: str | None
    runs: int
    """Of how many runs it is the mean."""


def scores_of(played: Sequence[AgentScores]) -> list[Score]:
    """Every reward and metric: each agent's where there are several, and that of the episode.

    Where an agent ran several times, or several agents have a number of one name, it is their mean. The
    reward comes last: it goes before a metric of that name. Raises EpisodeError for what is no finite number,
    and where a reward is missing, which is never 0.
    """
    _check(played)
    agents = list(dict.fromkeys(run.agent for run in played))
    owners: list[str | None] = [None, *(agents if len(agents) > 1 else [])]
    scores: list[Score] = []
    for owner in owners:
        runs = [run for run in played if owner in (None, run.agent)]
        values: dict[str, list[float]] = defaultdict(list)
        for run in runs:
            for name, value in run.metrics.items():
                values[name] += [] if value is None else [value]
            for name, given in run.rewards.items():
                values[name] += [] if given is None else [given[0]]
        values[REWARD] = [run.reward for run in runs if run.reward is not None]
        scores += [
            Score(name, math.fsum(given) / len(given), owner, len(given))
            for name, given in values.items()
            if given
        ]
    return scores


def _check(played: Sequence[AgentScores]) -> None:
    for run in played:
        numbers = {name: given[0] * given[1] for name, given in run.rewards.items() if given is not None}
        numbers |= {name: value for name, value in run.metrics.items() if value is not None}
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise EpisodeError(
                    f"the environment's '{name}' of '{run.agent}' is {value}; mend what gives it: a reward "
                    "or a metric is a finite number"
                )
        if run.missing:
            raise EpisodeError(
                f"the environment did not come to give {', '.join(map(repr, run.missing))} of '{run.agent}': "
                "its scoring ran out of time. Raise `timeout: {scoring: …}` of that agent, or leave it out"
            )
