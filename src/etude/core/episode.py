"""An episode: its example, its tool calls, and the record of everything that happened.

The record is the finished value. A workflow receives the live object, `etude.rollout.Episode`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Literal, Protocol, Self

from etude.core.call import NO_USAGE, Call, Usage, continues
from etude.core.data_model import text_id
from etude.core.errors import RequestError
from etude.core.message import Message, Tool


@dataclass(frozen=True, slots=True)
class Example:
    """One dataset row, as workflows and evaluators see it."""

    id: str
    """Unique within its dataset, and stable: groups, resume and curriculum depend on it. A number or a UUID
    becomes its text."""

    inputs: Mapping[str, Any] = field(default_factory=dict)

    expected: Any = None
    """The expected answer, or None if there is none."""

    def __post_init__(self) -> None:
        """Convert the id to text. Raises ValueError for an id that names nothing, and for other inputs."""
        object.__setattr__(self, "id", text_id(self.id))
        if not isinstance(self.inputs, Mapping):
            raise ValueError(f"the inputs of example {self.id!r} are not a mapping: {self.inputs!r:.80}")

    def copy(self) -> Self:
        """Return a copy for one reader, whose changes reach nobody else. What cannot be copied is shared."""
        inputs = {name: _deepcopy_or_share(value) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, expected=_deepcopy_or_share(self.expected))


def _deepcopy_or_share(value: Any) -> Any:
    try:
        return deepcopy(value)
    except Exception:  # noqa: BLE001  a user's object, such as a client or a lock
        return value


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The answer of a tool, as the model reads it."""

    text: str
    is_error: bool = False
    """Whether the tool reports that it could not do the task."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One call of a tool within an episode."""

    source: str
    """The tool set that the tool belongs to: an entry of `tools`."""
    name: str
    arguments: dict[str, Any] | None
    """None if the model did not write a JSON object."""
    result: str
    """The text that the model received; for a failed call, the reason."""
    outcome: str = "ok"
    """`ok`; `error`: the tool reported an error; `refused`: the tool was not called, because the arguments
    were no JSON object or the limit of calls was reached; `failed`: the tool gave no answer."""
    seconds: float = 0.0
    began: float = field(default=0.0, compare=False)
    """Start of the call in Unix seconds; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """Limits on one set of tools within one episode."""

    max_calls: int = 100
    max_characters: int = 20_000
    """Longest result, in characters. The rest is cut off, and the model is told."""
    call_timeout: float = 30.0
    """Seconds that one call may take."""


class ToolSession(Protocol):
    """Tools that are open for one episode."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools in OpenAI's format, with unique names."""

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        """Call one of the tools. Raises ToolError if there is no answer."""


class ToolSource(Protocol):
    """Opens tools for episodes: the object that a component of the kind `tools` yields."""

    @property
    def forgets(self) -> bool:
        """Whether a session knows nothing about the calls of an earlier session.

        If so, a resumed episode repeats its recorded calls before the first new one.
        """

    def open(self) -> AbstractAsyncContextManager[ToolSession]:
        """Open the tools for one episode. Raises ToolError if they cannot be opened."""


@dataclass(frozen=True)
class ToolSet:
    """An entry of `tools`: the source, the tools that are offered, and their limits."""

    name: str
    source: ToolSource
    limits: ToolLimits = field(default_factory=ToolLimits)
    only: tuple[str, ...] | None = None
    """The tools that are offered; None for all."""
    prefix: str = ""
    """Text put before the name of each tool."""
    path: str = ""
    """The place in the config, such as `tools.search`; empty for tools set in code."""


WORKFLOW = "<workflow>"
"""The function name of calls that the workflow makes itself."""

SIMULATED_USER = "<user>"
"""The function name of calls that play a user. They are never trained on."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened between calls."""

    kind: Literal["step_reward", "note", "score", "tool"]
    after_call: int
    """Index of the last call before the event; -1 if there was none."""
    value: float | None = None
    text: str = ""
    """A note, or the reason for a number."""
    name: str = ""
    agent: str | None = None
    """The agent that gets the score or step reward; None for the whole episode."""
    tool: ToolUse | None = None
    """For the kind `tool`: the call and its result."""

    def __post_init__(self) -> None:
        for value in (self.text, self.name, self.agent or ""):
            if not isinstance(value, str):
                raise RequestError(f"a {self.kind}'s words and names are text, found {value!r:.80}")


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why an episode has no output. A failure is data: it is counted and shown, never a reward."""

    kind: Literal["raised", "timeout", "no_output", "call_failed", "tool_failed", "died"]
    """`died`: the process that played the episode ended."""
    reason: str
    origin: Literal["agent", "model", "tool", "environment"] = "agent"
    """The cause: the agent itself, a model or tool that did not answer in time, or the environment, which is
    anything else the episode needs. Except after `agent`, a retry of the same episode may succeed."""


@dataclass(frozen=True, slots=True)
class EpisodeRecord:
    """Everything that happened in one run of the workflow on one example."""

    id: str
    """Unique within the run folder; also the journal key of the record."""
    example: Example
    generation: int
    """The number of this episode among the example's parallel episodes, from 0."""
    calls: tuple[Call, ...] = ()
    events: tuple[Event, ...] = ()
    output: Any = None
    failure: Failure | None = None
    seconds: float = 0.0

    @property
    def usage(self) -> Usage:
        """The sum of tokens over all answered calls."""
        answered = (call.completion.usage for call in self.calls if call.completion is not None)
        return reduce(Usage.plus, answered, NO_USAGE)


@dataclass(frozen=True, slots=True)
class AddedCall:
    """A call with the messages that its prompt adds to the prompt of the call that it continues."""

    call: Call
    messages: tuple[Message, ...]
    continues: int | None
    """The index of the continued call, unless it is the one before."""


def in_order(record: EpisodeRecord) -> Iterator[AddedCall | Event]:
    """Yield the calls of an episode, each followed by the events before the next."""
    yield from (event for event in record.events if event.after_call < 0)
    for position, call in enumerate(record.calls):
        before, messages = record.calls[:position], call.request.messages
        earlier = next((other for other in reversed(before) if continues(messages, other)), None)
        known = 0 if earlier is None else len(earlier.request.messages) + 1
        other = None if earlier is None or earlier is before[-1] else earlier.index
        yield AddedCall(call, tuple(messages[known:]), other)
        yield from (event for event in record.events if event.after_call == call.index)


def recorded_score(record: EpisodeRecord, name: str, agent: str | None = None) -> Event | None:
    """Return the last score with this name and agent that the episode measured; None if there is none."""
    scores = (event for event in reversed(record.events) if event.kind == "score")
    return next((event for event in scores if (event.name, event.agent) == (name, agent)), None)


def cut_off_share(calls: Mapping[str, int]) -> float | None:
    """Return the share of answers that were cut off, from call counts; None without answers."""
    return calls["cut_off"] / calls["answers"] if calls.get("answers") else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedExample(Example):
    """An example whose episodes were played before the run, such as logged chats, and are only read."""

    episodes: int
    """The number of episodes. Every collection uses all of them, also if it asks for fewer."""
    read: Callable[[int], EpisodeRecord]
    """Returns the episode with a number, from 0. Raises StoreError."""
    origin: str
    """The source of the episodes, for messages: `runs/chats`."""

    def make_record(self, episode_id: str, generation: int, model: str) -> EpisodeRecord:
        """Return a logged episode as one of this run, with its calls attributed to `model` in `llms`."""
        record = self.read(generation)
        calls = tuple(
            replace(call, model=model, logged=True, request=replace(call.request, conversation=episode_id))
            for call in record.calls
        )
        example = Example(self.id, self.inputs, self.expected)
        return replace(record, id=episode_id, example=example, generation=generation, calls=calls)


def count_episodes(examples: Iterable[Example], generations: int) -> int:
    """Return the episodes of a collection: all of a logged example, and `generations` of each other one."""
    return sum(each.episodes if isinstance(each, LoggedExample) else generations for each in examples)
