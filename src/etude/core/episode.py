"""An episode: the example that it is about, the tools that it calls, and the record of what happened.

The record is the finished value. The live object that a workflow is handed is `etude.rollout.Episode`.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, Protocol

from etude.core.call import NO_USAGE, Call, Usage
from etude.core.data_model import text_id
from etude.core.message import Tool


@dataclass(frozen=True, slots=True)
class Example:
    """One dataset row, as workflows and evaluators see it."""

    id: str
    """Unique within its dataset, and stable: groups, resume and curriculum go by it. A number or a UUID
    becomes its text."""

    inputs: Mapping[str, Any] = field(default_factory=dict)
    """The inputs of the agent, by column name."""

    expected: Any = None
    """The expected answer, or None where there is none."""

    def __post_init__(self) -> None:
        """Raises ValueError for an id that names nothing."""
        object.__setattr__(self, "id", text_id(self.id))


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool, as the model reads it."""

    text: str
    is_error: bool = False
    """Whether the tool says that it could not do what it was asked for."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One call of a tool within an episode."""

    source: str
    """The set that the tool belongs to: an entry of `tools`."""
    name: str
    arguments: dict[str, Any] | None
    """None when the model did not write a JSON object."""
    result: str
    """The text that the model was given; of a call that failed, why."""
    outcome: str = "ok"
    """`ok`; `error` where the tool said so; `refused` where it was not asked: for arguments that are no JSON
    object, or beyond the limit of calls; `failed` where there was no answer."""
    seconds: float = 0.0
    began: float = field(default=0.0, compare=False)
    """When it was asked, in Unix seconds; 0 where that is not known."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Bounds on one set of tools within one episode."""

    max_calls: int = 100
    max_characters: int = 20_000
    """Of one result; the rest is cut off, and the model is told so."""
    call_timeout: float = 30.0
    """Seconds that one call may take."""


class ToolSession(Protocol):
    """Tools that are open for one episode."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools in OpenAI's format, no two of one name."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call one of the tools. Raises ToolError when there is no answer to be had."""

    async def log(self) -> str:
        """The end of what the tools' server has logged since the session began; empty where it has no log."""


class ToolSource(Protocol):
    """Opens tools for episodes. The object that a component of the kind `tools` yields."""

    @property
    def forgets(self) -> bool:
        """Whether a session knows nothing of calls that were made in one before it.

        Then an episode that is resumed makes its recorded calls again before the first new one.
        """

    def open(self) -> AbstractAsyncContextManager[ToolSession]:
        """The tools for one episode. Raises ToolError when they cannot be opened."""


@dataclass(frozen=True)
class ToolSet:
    """An entry of `tools`: where they come from, which of them are offered, and their bounds."""

    name: str
    source: ToolSource
    limits: ToolLimits = field(default_factory=ToolLimits)
    only: tuple[str, ...] | None = None
    """The tools that are offered; None for all."""
    prefix: str = ""
    """Put before the name of each tool."""
    path: str = ""
    """Where the config says this, such as `tools.search`; empty for tools of a program."""


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

    @property
    def usage(self) -> Usage:
        """The tokens of all its calls that were answered."""
        answers = (call.completion for call in self.calls if call.completion is not None)
        return reduce(Usage.plus, (answer.usage for answer in answers), NO_USAGE)


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
