"""The record of an episode: an append-only log of calls and events, and how it ended.

This is the finished value. The live object that a workflow is handed is `etude.rollout.Episode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from etude.core.call import Call
from etude.core.example import Example
from etude.core.tools import ToolUse

WORKFLOW = "<workflow>"
"""The function name of calls that the workflow makes itself."""

SIMULATED_USER = "<user>"
"""The function name of calls that play a user. They are never trained on."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened between calls."""

    kind: Literal["step_reward", "note", "score", "tool", "log"]
    after_call: int
    """Index of the last call before the event; -1 when there was none."""
    value: float | None = None
    text: str = ""
    """A note, the reason for a number, or the end of a log."""
    name: str = ""
    """The name of a score."""
    agent: str | None = None
    """Whose score or step reward it is; None: the whole episode's."""
    tool: ToolUse | None = None
    """Of the kind `tool`: the call and its result."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why an episode has no output. A failure is data: it is counted and shown, never a reward."""

    kind: Literal["raised", "timeout", "no_output", "call_failed", "tool_failed", "died"]
    """`died`: the process that played it ended."""
    reason: str
    origin: Literal["agent", "model", "tool", "environment"] = "agent"
    """Whose failure it is: the agent's own, that of a model or a tool that did not answer, or not in time, or
    that of what the episode needs besides. But for the first, the same episode may go well another time."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """All that happened in one run of the workflow on one example."""

    id: str
    """Unique within the run folder; also the journal key under which the record is kept."""
    example: Example
    generation: int
    """Which of the example's parallel episodes this is, from 0."""
    calls: tuple[Call, ...] = ()
    events: tuple[Event, ...] = ()
    output: Any = None
    failure: Failure | None = None
    seconds: float = 0.0
    """Wall time of the episode."""


def measured(record: EpisodeRecord, name: str, agent: str | None = None) -> Event | None:
    """The score of that name that was measured in the episode, the last one; None where there is none."""
    scores = (event for event in reversed(record.events) if event.kind == "score")
    return next((event for event in scores if (event.name, event.agent) == (name, agent)), None)


def cut_off_share(calls: Mapping[str, int]) -> float | None:
    """The share of the answers that were cut off, by the counts of calls; None where there are no answers."""
    return calls["cut_off"] / calls["answers"] if calls.get("answers") else None


def call_counts(record: EpisodeRecord) -> dict[str, int]:
    """The model calls of an episode: `answers`, of them `cut_off` ones, `failed` ones and `retries`.

    Where it called tools, also `tool_calls`, and of them, by outcome, `tool_error`, `tool_refused` and
    `tool_failed` ones, if there are any.
    """
    counts = {"answers": 0, "cut_off": 0, "failed": 0, "retries": 0}
    for call in record.calls:
        counts["retries"] += call.retries
        if call.completion is None:
            counts["failed"] += 1
        else:
            counts["answers"] += 1
            counts["cut_off"] += call.completion.finish_reason == "length"
    for event in record.events:
        if event.tool is not None:
            outcome = event.tool.outcome
            for name in ("tool_calls",) if outcome == "ok" else ("tool_calls", f"tool_{outcome}"):
                counts[name] = counts.get(name, 0) + 1
    return counts


def retry_counts(record: EpisodeRecord) -> tuple[Counter[str], float]:
    """Why attempts at the model calls of an episode were made again, and the seconds waited between them."""
    causes = Counter[str]()
    for call in record.calls:
        if call.retried:
            causes.update(call.retried)
    return causes, sum(call.waited for call in record.calls)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedExample(Example):
    """An example whose episodes were played before the run, such as logged chats: these are read."""

    episodes: int
    """How many there are. A collection has all of them, whatever number it asks for."""
    read: Callable[[int], EpisodeRecord]
    """The episode of a number, from 0. Raises StoreError."""
    origin: str
    """Where they come from, for messages: `runs/chats`."""

    def played(self, episode_id: str, generation: int, model: str) -> EpisodeRecord:
        """An episode as one of the run's own, whose calls count as answered by `model` of `llms`."""
        record = self.read(generation)
        calls = tuple(
            replace(call, model=model, logged=True, request=replace(call.request, conversation=episode_id))
            for call in record.calls
        )
        example = Example(self.id, self.inputs, self.expected)
        return replace(record, id=episode_id, example=example, generation=generation, calls=calls)
