"""The rewards and metrics of an environment as scores of an episode, and its failures with their causes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.core.errors import EnvironmentAway, EpisodeError, EtudeError

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


REMEDIES = {
    "SandboxError": "is the runtime of the agent there, and does its image run? See: etude check",
    "TunnelError": "remote runtimes reach this machine by a tunnel, which needs a network and PRIME_API_KEY",
    "InterceptionError": "the agent's program lost its connection here; is its runtime still there?",
    "ToolsetError": "a tool server of the environment did not start; try `vf-debug` with this taskset",
    "HarnessError": "the program that plays the agent failed; is what it needs installed in its runtime?",
}
"""Hints, by verifiers' names of errors that are no fault of the agent's, nor of the environment's code."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARY = ("/site-packages/", "/dist-packages/", "<frozen", "/lib/python3")
_OURS = str(Path(__file__).parents[2])


@dataclass(frozen=True, slots=True)
class Problem:
    """One error that verifiers recorded."""

    kind: str
    """The name of its class."""
    message: str
    traceback: str = ""
    agent: str | None = None
    """Whose run failed; None: the environment's own code did."""

    @property
    def where(self) -> str:
        """`file:line` of the innermost line that is neither ours nor a library's; empty without one."""
        own = [
            f"{frame['file']}:{frame['line']}"
            for frame in _FRAME.finditer(self.traceback)
            if not frame["file"].startswith(_OURS) and not any(part in frame["file"] for part in _LIBRARY)
        ]
        return own[-1] if own else ""


def problems_of(played: Any) -> Iterator[Problem]:
    """The last error of each run of an agent that failed, then that of the environment itself."""
    for trace in played.traces:
        if not trace.ok:
            yield from _last(trace, trace.agent.name)
    yield from _last(played, None)


def _last(holder: Any, agent: str | None) -> Iterator[Problem]:
    if holder.errors:
        error = holder.errors[-1]
        yield Problem(error.type, error.message, error.traceback or "", agent)


def failure_of(
    environment: str, task: str, problems: Sequence[Problem], calls: Sequence[EtudeError]
) -> EtudeError:
    """The error that an episode ends with. Its cause is the last model call that failed, if one did.

    What is nobody's fault is EnvironmentAway, so that another try is made where that is asked for.
    """
    if not problems:
        return EpisodeError(f"'{environment}' did not finish the task {task!r}, and does not say why")
    first = problems[0]
    whose = "the environment" if first.agent is None else f"agent '{first.agent}'"
    where = f"{first.where}: " if first.where else ""
    message = f"{where}'{environment}', task {task!r}, {whose}: {first.kind}: {first.message}"
    if calls:
        error = EpisodeError(f"'{environment}', task {task!r}, {whose}: {calls[-1]}")
        error.__cause__ = calls[-1]
        return error
    if first.kind in REMEDIES:
        return EnvironmentAway(f"{message} ({REMEDIES[first.kind]})")
    return EpisodeError(message)
