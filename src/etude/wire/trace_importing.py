"""From the calls of a log to the chats of a run folder, to look at, score and learn from.

Decides which calls form a chat, which chats began alike, and which parts to leave out.
"""

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.config.builder import Builder
from etude.config.component import DatasetConfig
from etude.config.registry import register_dataset
from etude.core.call import Call
from etude.core.conversion import written
from etude.core.episode import WORKFLOW, EpisodeRecord, Event, Example, Failure, LoggedExample
from etude.core.errors import DatasetError, RequestError
from etude.core.keys import content_hash, fold
from etude.core.message import Message, is_text, message_key, message_text
from etude.core.secrets import masked_data
from etude.store.episodes import read_episode, stored_episodes, write_episode
from etude.store.facts import IMPORT, find_run
from etude.store.journal import Journal
from etude.store.run_folder import RunFolder
from etude.wire.logged_chats import LoggedCall, Record, SkippedEntry, read_records

CHATS, HELD_OUT = "chats", "held_out"
"""The phases of a run of chats: those to learn from, and those with held-out prompts."""


Chat: TypeAlias = list[LoggedCall]
"""Calls that belong together, in order."""


class Log:
    """The entries of a log, from all its files."""

    def __init__(self) -> None:
        self.left_out: dict[str, tuple[int, str]] = {}
        """The parts that form no chat, by reason: their number, and the place of the first one."""
        self._calls: dict[str, LoggedCall] = {}

    def add(self, records: Iterable[Record]) -> None:
        """Add entries. Of two calls with one id, the first is kept."""
        for record in records:
            if isinstance(record, SkippedEntry):
                self._leave_out(record.where, record.reason)
            else:
                self._add_call(record)

    def _leave_out(self, where: str, reason: str) -> None:
        count, first = self.left_out.get(reason, (0, where))
        self.left_out[reason] = count + 1, first

    def _add_call(self, call: LoggedCall) -> None:
        name = call.id or f"{call.where}#{len(self._calls)}"
        spoken = _spoken(call)
        if name in self._calls:
            self._leave_out(call.where, "call whose id occurs twice")
        elif not all(map(is_text, spoken)):
            self._leave_out(call.where, "call with a part that is not text, such as an image")
        elif call.completion is not None and not (message_text(spoken[-1]) or spoken[-1].get("tool_calls")):
            self._leave_out(call.where, "call with an empty answer")
        else:
            self._calls[name] = call

    def chats(self) -> list[Chat]:
        """Return the chats: one trace each, several traces that continue each other, or one call."""
        calls = [*self._calls.values()]
        if all(call.began for call in calls):
            calls.sort(key=lambda call: call.began)
        by_trace: dict[str, Chat] = {}
        chats: dict[int, Chat] = {}
        open_chats: dict[bytes, Chat] = {}
        """The chats that may go on, by everything said in them."""
        for call in calls:
            digests = [] if call.is_whole else _digests(call.session, _spoken(call))
            chat = by_trace.get(call.trace) if call.trace else None
            if chat is None:
                # The last digest includes the call's own answer.
                earlier = digests[:-1] if call.completion is not None else digests
                found = (open_chats.pop(digest, None) for digest in reversed(earlier))
                chat = next((each for each in found if each is not None), [])
            if call.trace:
                by_trace[call.trace] = chat
            if call.completion is not None and digests:
                open_chats[digests[-1]] = chat
            chat.append(call)
            chats[id(chat)] = chat
        return [*chats.values()]


def _spoken(call: LoggedCall) -> tuple[Message, ...]:
    answer = () if call.completion is None else (call.completion.message,)
    return (*call.request.messages, *answer)


def _digests(session: str, messages: Sequence[Message]) -> list[bytes]:
    """Return a digest of the conversation up to each answer of the assistant."""
    digest, digests = hashlib.blake2b(session.encode("utf-8", "replace"), digest_size=16), []
    for message in messages:
        digest.update(message_key(message).encode("utf-8", "replace") + b"\0")
        if message["role"] == "assistant":
            digests.append(digest.copy().digest())
    return digests


def chat_episodes(chats: Sequence[Chat], hold_out: float) -> Iterator[EpisodeRecord]:
    """Yield each chat as an episode. Chats that began with the same prompt share an example."""
    examples = [_make_example(chat) for chat in chats]
    order = sorted({example.id for example in examples}, key=lambda name: fold(0, "hold out", name))
    # With two prompts or more, hold out at least one, unless the share is 0.
    least = 1 if hold_out and len(order) > 1 else 0
    held_out = set(order[: max(round(hold_out * len(order)), least)])
    generations: defaultdict[str, int] = defaultdict(int)
    for chat, example in zip(chats, examples, strict=True):
        generation = generations[example.id]
        generations[example.id] += 1
        phase = HELD_OUT if example.id in held_out else CHATS
        yield _make_episode(chat, example, generation, f"{phase}/{example.id}/{generation}")


def _make_example(chat: Chat) -> Example:
    first = chat[0].request
    expected = next((call.expected for call in reversed(chat) if call.expected is not None), None)
    messages, tools = masked_data(list(first.messages)), list(first.tools)
    inputs = {"messages": messages, "tools": tools} if tools else {"messages": messages}
    return Example(content_hash([[*map(message_key, messages)], tools, expected]), inputs, expected)


def _make_episode(chat: Chat, example: Example, generation: int, name: str) -> EpisodeRecord:
    calls = tuple(
        Call(
            index,
            WORKFLOW,
            call.model,
            replace(call.request, messages=tuple(masked_data([*call.request.messages])), conversation=name),
            call.completion and replace(call.completion, message=masked_data(call.completion.message)),
            error=call.error,
            began=call.began,
            logged=True,
        )
        for index, call in enumerate(chat)
    )
    scores = (score for call in chat for score in call.scores)
    events = tuple(
        Event("score", len(calls) - 1, score.value, masked_data(score.reason), score.name) for score in scores
    )
    last = calls[-1]
    output = None if last.completion is None else written(last.completion.message)
    failure = None if last.completion is not None else Failure("call_failed", last.error or "", "model")
    return EpisodeRecord(
        id=name,
        example=example,
        generation=generation,
        calls=calls,
        events=events,
        output=output,
        failure=failure,
    )


@dataclass(frozen=True, slots=True)
class Imported:
    """The chats found in a log."""

    files: list[str]
    chats: int = 0
    calls: int = 0
    failed: int = 0
    """Chats that ended in an error."""
    prompts: int = 0
    """Different first prompts of chats."""
    compared: int = 0
    """Prompts that several chats began with."""
    held_out: int = 0
    """Prompts that are held out."""
    scores: dict[str, int] = field(default_factory=dict)
    """Chats with feedback, by its name."""
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    """The parts of the log that form no chat, by reason: their number, and the place of the first one."""

    def as_json(self) -> dict[str, Any]:
        """Return all fields as JSON."""
        left_out = {reason: {"count": n, "first": first} for reason, (n, first) in self.left_out.items()}
        return {**asdict(self), "left_out": left_out}


def read_log(
    files: Sequence[Path], *, skip_broken: bool = False, hold_out: float = 0.2
) -> tuple[list[EpisodeRecord], Imported]:
    """Read a log's chats as episodes, and count them. Raises DatasetError, and RequestError for none."""
    log = Log()
    for file in files:
        log.add(read_records(file, skip_broken=skip_broken))
    episodes = [*chat_episodes(log.chats(), hold_out)]
    left_out = dict(sorted(log.left_out.items(), key=lambda each: -each[1][0]))
    if not episodes:
        reasons = "".join(f"\n  {reason}: {n}, first at {at}" for reason, (n, at) in left_out.items())
        raise RequestError(f"there are no chats in {', '.join(map(str, files))}{reasons}")
    sizes = Counter(episode.example.id for episode in episodes)
    held_out = {episode.example.id for episode in episodes if episode.id.startswith(f"{HELD_OUT}/")}
    scores = Counter(name for episode in episodes for name in {event.name for event in episode.events})
    return episodes, Imported(
        files=[*map(str, files)],
        chats=len(episodes),
        calls=sum(len(episode.calls) for episode in episodes),
        failed=sum(episode.failure is not None for episode in episodes),
        prompts=len(sizes),
        compared=sum(size > 1 for size in sizes.values()),
        held_out=len(held_out),
        scores=dict(scores),
        left_out=left_out,
    )


async def write_run(run: RunFolder, episodes: Iterable[EpisodeRecord], imported: Imported) -> None:
    """Store the episodes in a new run folder, and last the counts. Raises StoreError."""
    rest = iter(episodes)
    while some := list(islice(rest, 256)):
        await asyncio.gather(*(_write(run.journal, episode) for episode in some))
    await run.journal.put(IMPORT, imported.as_json())


async def _write(journal: Journal, episode: EpisodeRecord) -> None:
    """Store an episode, with its feedback as its scores."""
    for event in episode.events:
        score = {"score": event.value, "reasoning": event.text or None, "error": None}
        await journal.put(f"{episode.id}/score/{event.name}", score)
    await write_episode(journal, episode)


class LoggedConfig(DatasetConfig, name="logged"):
    """Chats that `etude import-traces` has stored."""

    run: Path
    """Set the folder of their run, or its name in `runs`."""
    part: Literal["chats", "held_out"] = "chats"
    """`chats`: use the stored chats, without asking a model. `held_out`: have the agent answer the held-out
    prompts."""


@dataclass(frozen=True)
class LoggedDataset:
    """The chats of a run, by their first prompts."""

    config: LoggedConfig
    run: RunFolder

    def examples(self) -> list[Example]:
        """Return an example for each prompt, in the order of ids, without chats that ended in an error."""
        part, journal = self.config.part, self.run.journal
        phase = HELD_OUT if part == "held_out" else CHATS
        names: defaultdict[str, list[str]] = defaultdict(list)
        examples: dict[str, Example] = {}
        for name, data in stored_episodes(journal, f"{phase}/"):
            if data["failure"] is None:
                example = Example(**data["example"])
                names[example.id].append(name)
                examples[example.id] = example
        if not names:
            hint = "; import the log with --hold-out 0.2" if part == "held_out" else ""
            raise DatasetError(f"{self.run.path} has no chats of the part '{part}'{hint}")
        chosen = [*examples.values()]
        if part == "held_out":
            return chosen
        return [
            LoggedExample(
                each.id,
                each.inputs,
                each.expected,
                episodes=len(names[each.id]),
                read=partial(self._read, names[each.id]),
                origin=self.run.name,
            )
            for each in chosen
        ]

    def _read(self, names: list[str], number: int) -> EpisodeRecord:
        record = read_episode(self.run.journal, names[number])
        assert record is not None, "an import is never written to again"
        return record


@register_dataset(config_type=LoggedConfig)
async def logged(config: LoggedConfig, builder: Builder) -> AsyncIterator[LoggedDataset]:
    """Open the dataset. Raises RequestError if there is no such run."""
    with RunFolder.read(find_run(str(config.run), Path("runs"))) as run:
        yield LoggedDataset(config, run)
