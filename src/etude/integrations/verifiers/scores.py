"""The conversion of an environment's rewards, metrics and failures to scores and errors of an episode."""

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
"""The name of an environment's reward: the weighted sum of the rewards from its tasks and judges."""


@dataclass(frozen=True, slots=True)
class Score:
    """A score for `episode.score`."""

    name: str
    value: float
    agent: str | None
    runs: int
    """The number of runs that `value` is the mean of."""


def find_scores(traces: Sequence[Any]) -> list[Score]:
    """Return every reward and metric of the episode and, with several agents, of each agent.

    A score is the mean over an agent's runs, and over agents for the episode. The reward replaces a metric
    with the same name. Raises EpisodeError for a number that is not finite, and for a missing reward, which
    never counts as 0.
    """
    for trace in traces:
        agent = trace.agent.name
        numbers = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**numbers, **trace.metrics}.items():
            if value is not None and not math.isfinite(value):
                raise EpisodeError(
                    f"the environment's '{name}' of '{agent}' is {value}; a reward or a metric "
                    "must be a finite number"
                )
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise EpisodeError(
                f"the environment has not given {', '.join(map(repr, missing))} of '{agent}': its "
                "scoring ran out of time. Raise `timeout: {scoring: …}` of that agent, or leave it out"
            )
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


REMEDIES = {
    "SandboxError": "is the runtime of the agent there, and does its image run?",
    "TunnelError": "remote runtimes reach this machine by a tunnel, which needs a network and PRIME_API_KEY",
    "InterceptionError": "the agent's program lost its connection here; is its runtime still there?",
    "ToolsetError": "a tool server of the environment did not start; try `vf-debug` with this taskset",
    "HarnessError": "the program that plays the agent failed; is what it needs installed in its runtime?",
}
"""Hints for verifiers' errors that neither the agent nor the environment's code caused, by error name."""

_BY_CALLS = {"ProviderError", "HarnessError", "InterceptionError"}
"""verifiers' errors that a failed model call leads to."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARY = ("/site-packages/", "/dist-packages/", "<frozen", "/lib/python3")
_OURS = str(Path(__file__).parents[2])


Problem: TypeAlias = tuple[str | None, Any]
"""The agent whose run failed, or None for the environment's code, and the error that verifiers recorded."""


def find_problems(played: Any) -> Iterator[Problem]:
    """Yield the last error of each failed agent run, then the environment's last error."""
    for trace in played.traces:
        if not trace.ok and trace.errors:
            yield trace.agent.name, trace.errors[-1]
    if played.errors:
        yield None, played.errors[-1]


def episode_error(
    environment: str, task: str, problems: Sequence[Problem], calls: Sequence[EtudeError]
) -> EtudeError:
    """Return the error that ends an episode. A failed call is its cause if the environment reports one.

    A call that failed and was repeated does not hide an error of the environment's own code. Failures of the
    environment's infrastructure are EnvironmentAway, so that they can be retried.
    """
    if not problems:
        return EpisodeError(f"'{environment}' did not finish the task {task!r}, and does not say why")
    agent, first = problems[0]
    whose = "the environment" if agent is None else f"agent '{agent}'"
    if calls and first.type in _BY_CALLS:
        error = EpisodeError(f"'{environment}', task {task!r}, {whose}: {calls[-1]}")
        error.__cause__ = calls[-1]
        return error
    # Find the innermost line outside of Etude and of libraries.
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
