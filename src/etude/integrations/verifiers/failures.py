"""The failures of an environment as Etude's, with their causes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.errors import EnvironmentAway, EpisodeError, EtudeError

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
