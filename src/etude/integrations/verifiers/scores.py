"""The rewards and metrics of an environment as scores of an episode, and its failures with their causes."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from etude.core.errors import EnvironmentAway, EpisodeError, EtudeError

REWARD = "reward"
"""The score that is an environment's reward: the weighted sum of what its tasks and its judges give."""


@dataclass(frozen=True, slots=True)
class Score:
    """A number for `episode.score`."""

    name: str
    value: float
    agent: str | None
    runs: int
    """Of how many runs it is the mean."""


def scores_of(traces: Sequence[Any]) -> list[Score]:
    """Every reward and metric: each agent's where there are several, and that of the episode.

    Where an agent ran several times, or several agents have a number of one name, it is their mean. The
    reward comes last: it goes before a metric of that name. Raises EpisodeError for what is no finite number,
    and where a reward is missing, which is never 0.
    """
    for trace in traces:
        _check(trace)
    agents = list(dict.fromkeys(trace.agent.name for trace in traces))
    owners: list[str | None] = [None, *(agents if len(agents) > 1 else [])]
    scores: list[Score] = []
    for owner in owners:
        values: dict[str, list[float]] = defaultdict(list)
        rewards: list[float] = []
        for trace in traces:
            if owner not in (None, trace.agent.name):
                continue
            for name, value in trace.metrics.items():
                values[name] += [] if value is None else [value]
            for name, reward in trace.rewards.items():
                values[name].append(reward.score)
            if trace.rewards:
                rewards.append(math.fsum(reward.value for reward in trace.rewards.values()))
        scores += [
            Score(name, math.fsum(given) / len(given), owner, len(given))
            for name, given in {**values, REWARD: rewards}.items()
            if given
        ]
    return scores


def _check(trace: Any) -> None:
    agent = trace.agent.name
    numbers = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    numbers |= {name: value for name, value in trace.metrics.items() if value is not None}
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise EpisodeError(
                f"the environment's '{name}' of '{agent}' is {value}; mend what gives it: a reward or a "
                "metric is a finite number"
            )
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing:
        raise EpisodeError(
            f"the environment did not come to give {', '.join(map(repr, missing))} of '{agent}': its scoring "
            "ran out of time. Raise `timeout: {scoring: …}` of that agent, or leave it out"
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


Problem: TypeAlias = tuple[str | None, Any]
"""Whose run failed, None where the environment's own code did, and the error that verifiers recorded."""


def problems_of(played: Any) -> Iterator[Problem]:
    """The last error of each run of an agent that failed, then that of the environment itself."""
    for trace in played.traces:
        if not trace.ok and trace.errors:
            yield trace.agent.name, trace.errors[-1]
    if played.errors:
        yield None, played.errors[-1]


def failure_of(
    environment: str, task: str, problems: Sequence[Problem], calls: Sequence[EtudeError]
) -> EtudeError:
    """The error that an episode ends with. Its cause is the last model call that failed, if one did.

    What is nobody's fault is EnvironmentAway, so that another try is made where that is asked for.
    """
    if not problems:
        return EpisodeError(f"'{environment}' did not finish the task {task!r}, and does not say why")
    agent, first = problems[0]
    whose = "the environment" if agent is None else f"agent '{agent}'"
    if calls:
        error = EpisodeError(f"'{environment}', task {task!r}, {whose}: {calls[-1]}")
        error.__cause__ = calls[-1]
        return error
    # The innermost line that is neither ours nor a library's.
    own = [
        f"{frame['file']}:{frame['line']}: "
        for frame in _FRAME.finditer(first.traceback or "")
        if not frame["file"].startswith(_OURS) and not any(part in frame["file"] for part in _LIBRARY)
    ]
    place = own[-1] if own else ""
    message = f"{place}'{environment}', task {task!r}, {whose}: {first.type}: {first.message}"
    if first.type in REMEDIES:
        return EnvironmentAway(f"{message} ({REMEDIES[first.type]})")
    return EpisodeError(message)
