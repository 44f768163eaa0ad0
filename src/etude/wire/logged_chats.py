"""Logged chats as episodes: rows in OpenAI's format, their import into a run, and the dataset that reads it.

{"messages": [...], "tools": [...]}
{"request": {"model": ..., "messages": [...]}, "response": {"object": "chat.completion", "choices": [...]}}
"""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, BaseModel, BeforeValidator, Field, StringConstraints
from pydantic_core import to_json

from etude.config.builder import Builder
from etude.config.component import DatasetConfig
from etude.config.data_files import read_json_list, read_jsonl, read_parquet
from etude.config.registry import register_dataset
from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import WORKFLOW, EpisodeRecord, Event, Example, LoggedExample
from etude.core.errors import DatasetError, RequestError
from etude.core.evaluation import LARGEST_SCORE
from etude.core.json_text import read_json
from etude.core.keys import content_hash, fold
from etude.core.message import is_text, message_key, message_text, plain_text
from etude.core.records import RunEnded
from etude.core.secrets import masked_data
from etude.store.episodes import read_episode, score_key, stored_episodes, write_episode
from etude.store.facts import find_run
from etude.store.journal import Journal, ModelLog
from etude.store.run_folder import RunFolder
from etude.wire.client import parse_completion
from etude.wire.request_body import check_conversation, plain_messages, validate_body
from etude.wire.retries import Refusal, Retryable

CHATS, HELD_OUT = "chats", "held_out"
"""The phases of a run of chats: those to learn from, and those with held-out prompts."""


@dataclass(slots=True)
class Chat:
    """The calls of one conversation, in order, with its feedback."""

    calls: list[Call]
    expected: Any = None
    scores: dict[str, float] = field(default_factory=dict)


def _parse(value: Any) -> Any:
    is_json = isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
    return read_json(value) if is_json else value


_Parsed = BeforeValidator(_parse)
"""Parses a column that holds JSON text."""
_Score: TypeAlias = Annotated[float, Field(ge=-LARGEST_SCORE, le=LARGEST_SCORE)]
_Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[^/]+$")]


class _Request(BaseModel):
    messages: Annotated[list[Any] | None, _Parsed] = None
    tools: Annotated[list[Any] | None, _Parsed] = None
    model: str | None = None

    def as_chat(self) -> ChatRequest:
        """Return the request. Raises RequestError if it is not OpenAI's."""
        # A weight says whether an answer is to be learned from.
        given = [
            {name: value for name, value in message.items() if name != "weight"}
            if isinstance(message, dict)
            else message
            for message in self.messages or ()
        ]
        messages, tools = plain_messages(masked_data(given)), tuple(self.tools or ())
        if not all(map(is_text, messages)):
            raise RequestError("a message has a part that is not text, such as an image")
        check_conversation((), tools)
        return ChatRequest(messages, tools)


class _Row(_Request):
    """A conversation, or a request with its response."""

    trace_id: str | int | None = None
    expected: Any = Field(default=None, validation_alias=AliasChoices("expected", "answer"))
    score: _Score | None = None
    reward: _Score | None = None
    feedback: _Score | None = None
    scores: dict[_Name, _Score | None] | None = None
    request: Annotated[_Request | None, _Parsed] = None
    response: Annotated[dict[str, Any] | None, _Parsed] = None

    def chats(self) -> list[Chat]:
        """Return the row's chats: one, or one for each answer to a request. Raises RequestError.

        A conversation has a call for each answer, except those with weight 0.
        """
        if self.messages is not None:
            asked, calls = self.as_chat(), list[Call]()
            for at, message in enumerate(asked.messages):
                if at and message["role"] == "assistant" and self.messages[at].get("weight") != 0:
                    answer = Completion(message, "tool_calls" if message.get("tool_calls") else "stop")
                    calls.append(_call(replace(asked, messages=asked.messages[:at]), answer, self.model))
            if not calls:
                raise RequestError("a conversation has no answer by the assistant")
            chats = [calls]
        elif self.request is None or self.response is None:
            raise RequestError("a row must have `messages`, or a `request` and its `response`")
        else:
            chats = [[call] for call in _answers(self.request, self.response)]
        given = {"score": self.score, "reward": self.reward, "feedback": self.feedback, **(self.scores or {})}
        scores = {name: value for name, value in given.items() if value is not None}
        # Feedback on a request is about its first answer.
        return [Chat(calls, self.expected, {} if at else scores) for at, calls in enumerate(chats)]


def _answers(request: _Request, response: dict[str, Any]) -> Iterator[Call]:
    """Yield a call for each answer to a request. Raises RequestError if there is none."""
    asked, choices = request.as_chat(), response.get("choices")
    if not choices or not isinstance(choices, list):
        raise RequestError("a response has no choices: it is an error, cut off, or no chat completion")
    for choice in choices:
        try:
            answer = parse_completion(to_json({**response, "choices": [choice]}))
        except (Retryable, Refusal) as problem:
            raise RequestError(f"response: {problem}") from problem
        completion = Completion(masked_data(answer.message), answer.finish_reason, usage=answer.usage)
        yield _call(asked, completion, str(response.get("model") or request.model or ""))


def _call(request: ChatRequest, answer: Completion, model: str | None) -> Call:
    if not is_text(answer.message) or not (message_text(answer.message) or answer.message.get("tool_calls")):
        raise RequestError("an answer is empty, or is not text")
    return Call(0, WORKFLOW, model or "", request, answer, logged=True)


@dataclass(frozen=True, slots=True)
class Imported:
    """The chats found in a log."""

    files: list[str]
    chats: int = 0
    calls: int = 0
    prompts: int = 0
    """Different first prompts of chats."""
    compared: int = 0
    """Prompts that several chats began with."""
    held_out: int = 0
    """Prompts that are held out."""
    scores: dict[str, int] = field(default_factory=dict)
    """Chats with feedback, by its name."""
    left_out: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The rows that form no chat, by reason: their `count`, and the place of the `first` one."""


def read_log(files: Sequence[Path], *, hold_out: float = 0.2) -> tuple[list[EpisodeRecord], Imported]:
    """Read a log's chats as episodes, and count them. Rows that form no chat are left out and counted.

    A file has JSON Lines, a JSON list (`.json`) or Parquet. Raises DatasetError for an unreadable file, and
    RequestError if there are no chats.
    """
    chats: list[Chat] = []
    traces: dict[str, Chat] = {}
    left_out: dict[str, dict[str, Any]] = {}
    readers = {".parquet": read_parquet, ".json": read_json_list}
    for where, row in (row for file in files for row in readers.get(file.suffix, read_jsonl)(file)):
        try:
            read = validate_body(_Row, row)
            found = read.chats()
        except RequestError as error:
            reason = str(error).partition(", found ")[0]
            left_out.setdefault(reason, {"count": 0, "first": where})["count"] += 1
            continue
        trace_id = "" if read.trace_id is None else str(read.trace_id)
        if (trace := traces.get(trace_id)) is not None:
            first = found.pop(0)
            trace.calls += first.calls
            trace.scores |= first.scores
            trace.expected = trace.expected if first.expected is None else first.expected
        elif trace_id:
            traces[trace_id] = found[0]
        chats += found
    left_out = dict(sorted(left_out.items(), key=lambda each: -each[1]["count"]))
    if not chats:
        reasons = "".join(f"\n  {why}: {of['count']}, first at {of['first']}" for why, of in left_out.items())
        raise RequestError(f"there are no chats in {', '.join(map(str, files))}{reasons}")
    episodes = [*chat_episodes(chats, hold_out)]
    sizes = Counter(episode.example.id for episode in episodes)
    return episodes, Imported(
        files=[*map(str, files)],
        chats=len(episodes),
        calls=sum(len(episode.calls) for episode in episodes),
        prompts=len(sizes),
        compared=sum(size > 1 for size in sizes.values()),
        held_out=len({each.example.id for each in episodes if each.id.startswith(f"{HELD_OUT}/")}),
        scores=dict(Counter(name for chat in chats for name in chat.scores)),
        left_out=left_out,
    )


def chat_episodes(chats: Sequence[Chat], hold_out: float) -> Iterator[EpisodeRecord]:
    """Yield each chat as an episode. Chats that began with the same prompt share an example."""
    examples = []
    for chat in chats:
        first = chat.calls[0].request
        messages, tools = list(first.messages), list(first.tools)
        inputs = {"messages": messages, "tools": tools} if tools else {"messages": messages}
        key = content_hash([[*map(message_key, messages)], tools, chat.expected])
        examples.append(Example(key, inputs, chat.expected))
    order = sorted({example.id for example in examples}, key=lambda name: fold(0, "hold out", name))
    # With two prompts or more, hold out at least one, unless the share is 0.
    least = 1 if hold_out and len(order) > 1 else 0
    held_out = set(order[: max(round(hold_out * len(order)), least)])
    generations: Counter[str] = Counter()
    for chat, example in zip(chats, examples, strict=True):
        generation = generations[example.id]
        generations[example.id] += 1
        phase = HELD_OUT if example.id in held_out else CHATS
        name = f"{phase}/{example.id}/{generation}"
        calls = tuple(
            replace(call, index=index, request=replace(call.request, conversation=name))
            for index, call in enumerate(chat.calls)
        )
        last = calls[-1].completion
        yield EpisodeRecord(
            id=name,
            example=example,
            generation=generation,
            calls=calls,
            events=tuple(Event("score", len(calls) - 1, v, "", score) for score, v in chat.scores.items()),
            output=None if last is None else plain_text(last.message),
        )


async def write_run(run: RunFolder, episodes: Iterable[EpisodeRecord], imported: Imported) -> None:
    """Store the episodes in a new run folder, and last the counts. Raises StoreError."""
    rest = iter(episodes)
    while some := list(islice(rest, 256)):
        await asyncio.gather(*(_write(run.journal, episode) for episode in some))
    await ModelLog(run.journal).add(RunEnded(result=asdict(imported)))


async def _write(journal: Journal, episode: EpisodeRecord) -> None:
    """Store an episode, with its feedback as its scores."""
    for event in episode.events:
        score = {"score": event.value, "reasoning": None, "error": None}
        await journal.put(score_key(episode.id, str(event.name)), score)
    await write_episode(journal, episode)


class LoggedConfig(DatasetConfig, name="logged"):
    """Chats that `etude import-traces` has stored."""

    run: Path
    """Set the folder of their run, or its name in `runs`."""
    part: Literal["chats", "held_out"] = "chats"
    """`chats`: use the stored chats. `held_out`: have the agent answer the held-out prompts."""


@dataclass(frozen=True)
class LoggedDataset:
    """The chats of a run, by their first prompts."""

    config: LoggedConfig
    run: RunFolder

    def examples(self) -> list[Example]:
        """Return an example for each prompt, in the order of ids."""
        part = self.config.part
        phase = HELD_OUT if part == "held_out" else CHATS
        names: defaultdict[str, list[str]] = defaultdict(list)
        examples: dict[str, Example] = {}
        for name, data in stored_episodes(self.run.journal, f"{phase}/"):
            example = Example(**data["example"])
            names[example.id].append(name)
            examples[example.id] = example
        if not names:
            hint = "; import the log with --hold-out 0.2" if part == "held_out" else ""
            raise DatasetError(f"{self.run.path} has no chats of the part '{part}'{hint}")
        if part == "held_out":
            return [*examples.values()]
        return [
            LoggedExample(
                each.id,
                each.inputs,
                each.expected,
                episodes=len(names[each.id]),
                read=partial(self._read, names[each.id]),
                origin=self.run.name,
            )
            for each in examples.values()
        ]

    def _read(self, names: list[str], number: int) -> EpisodeRecord:
        record = read_episode(self.run.journal, names[number])
        assert record is not None, "an import is never written to again"
        return record


@register_dataset(config_type=LoggedConfig)
async def open_logged_dataset(config: LoggedConfig, builder: Builder) -> AsyncIterator[LoggedDataset]:
    """Open the dataset. Raises RequestError if there is no such run."""
    with RunFolder.read(find_run(str(config.run), Path("runs"))) as run:
        yield LoggedDataset(config, run)
