"""Transcripts of a stored run: a file for each episode of a phase, as a person reads it.

A play is shown as a transcript of its protocol; any other episode by its calls, what happened between
them, and what came of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeAlias

from etude.algorithms.episodes import is_play
from etude.core.call import Call, continues
from etude.core.episode import WORKFLOW, EpisodeRecord, Event, call_counts
from etude.core.errors import RequestError
from etude.core.json_text import read_json
from etude.core.keys import content_hash
from etude.core.message import Message, is_text, text_of
from etude.protocols.tree import as_json, as_yaml, transcript
from etude.store.episodes import choose_phase, iter_episodes, read_episode
from etude.store.files import write_atomically
from etude.store.journal import Journal
from etude.store.plain import jsonable
from etude.store.run_folder import RunFolder
from etude.store.stored_config import reward_name, stored_data

Format: TypeAlias = Literal["yaml", "json"]

_FORMATS: Mapping[Format, Callable[[Mapping[str, Any]], str]] = {"yaml": as_yaml, "json": as_json}
_UNSAFE = re.compile(r"[^\w.-]+")
_LONGEST = 80
"""Characters of an example's id in the name of a file."""


@dataclass(frozen=True, slots=True)
class Written:
    """The files that were written."""

    folder: Path
    phase: str
    files: tuple[str, ...]
    """In the folder, in the order of the episodes' ids."""
    failed: int
    """Of the episodes those that have no output."""
    cut_off: int = 0
    """Answers in them that were cut off at the limit of tokens."""


def write_transcripts(
    run: RunFolder,
    phase: str | None = None,
    *,
    folder: Path | None = None,
    format: Format = "yaml",
    limit: int | None = None,
    raw: bool = False,
) -> Written:
    """Write the transcripts of a phase, by default the latest, in `folder`, by default in the run's own.

    `limit` is for the first episodes only, in the order of their ids; `raw` shows answers as the models
    wrote them. Files of the same name are replaced. Raises RequestError when there are no episodes of the
    phase, StoreError when a file cannot be written.
    """
    chosen = choose_phase(run.journal, phase)
    path = (folder or run.path / "transcripts" / chosen).absolute()
    rewarded = reward_name(stored_data(run.path, required=False))
    files: list[str] = []
    failed = cut_off = 0
    for record in islice(iter_episodes(run.journal, phase=chosen), limit):
        files.append(f"{_name_of(record)}.{format}")
        shown = _shown(record, raw) | _scores(run.journal, record.id, rewarded)
        write_atomically(path / files[-1], _FORMATS[format](shown), exact=True)
        failed += record.failure is not None
        cut_off += call_counts(record)["cut_off"]
    return Written(path, chosen, tuple(files), failed, cut_off)


def episode_transcript(run: RunFolder, episode: str, *, format: Format = "yaml", raw: bool = False) -> str:
    """The transcript of one episode, by its id. Raises RequestError when the run has no such episode."""
    record = read_episode(run.journal, episode)
    if record is None:
        raise RequestError(
            f"run {run.name} has no episode '{episode}'; an episode is named by its phase, example and "
            f"generation. `etude transcripts {run.path}` writes those of a phase"
        )
    rewarded = reward_name(stored_data(run.path, required=False))
    return _FORMATS[format](_shown(record, raw) | _scores(run.journal, record.id, rewarded))


def _shown(record: EpisodeRecord, raw: bool) -> dict[str, Any]:
    """A play as a transcript of the protocol; the calls of everything else, and of what failed."""
    return transcript(record, raw=raw) if is_play(record) else _conversation(record, raw=raw)


def _scores(journal: Journal, episode: str, rewarded: str | None) -> dict[str, Any]:
    """The evaluators' outputs, and the score that is the reward."""
    prefix = f"{episode}/score/"
    scores = {key.removeprefix(prefix): _score(stored) for key, stored in journal.scan(prefix)}
    reward = (journal.get(f"{prefix}{rewarded}") or {}).get("score")
    return ({} if reward is None else {"reward": reward}) | ({"scores": scores} if scores else {})


def _score(stored: Mapping[str, Any]) -> Any:
    """A number; with what the evaluator had to say about it, where it did."""
    kept = {key: stored[key] for key in ("score", "reasoning", "error") if stored.get(key) is not None}
    return kept["score"] if kept.keys() == {"score"} else kept


def _name_of(record: EpisodeRecord) -> str:
    """A file name that no other episode of the phase has, and that every file system takes."""
    id = record.example.id
    name = _UNSAFE.sub("_", id)[:_LONGEST].lstrip(".")
    # No name that was left as it is has a ~ in it.
    return f"{name if name == id else f'{name}~{content_hash(id)}'}-{record.generation}"


def _conversation(record: EpisodeRecord, *, raw: bool = False) -> dict[str, Any]:
    """Calls and events in order, then the output or the failure.

    Of a call that continues an earlier one only the new messages are shown. `raw` shows every prompt in
    full, and all messages as they were sent and received.
    """
    example = record.example
    shown: dict[str, Any] = {
        "episode": record.id,
        "example": example.id,
        "inputs": jsonable(dict(example.inputs)),
        "expected": jsonable(example.expected),
        "turns": _turns(record, raw),
    }
    if record.failure is not None:
        return shown | {"failure": f"{record.failure.kind}: {record.failure.reason}"}
    return shown | {"output": jsonable(record.output)}


def _turns(record: EpisodeRecord, raw: bool) -> list[dict[str, Any]]:
    """The calls, each followed by what happened before the next."""
    turns = [_event(event) for event in record.events if event.after_call < 0]
    for position, call in enumerate(record.calls):
        turns.append(_call(call, record.calls[:position], raw))
        turns += [_event(event) for event in record.events if event.after_call == call.index]
    return turns


def _event(event: Event) -> dict[str, Any]:
    if event.kind in ("note", "log"):
        return {event.kind: event.text}
    if event.tool is not None:
        use = event.tool
        return {"tool": use.name, "of": use.source, "outcome": use.outcome, "seconds": round(use.seconds, 3)}
    named = {"score": event.name} if event.kind == "score" else {}
    whose = {} if event.agent is None else {"agent": event.agent}
    value = {"value" if named else "step_reward": event.value}
    return named | whose | value | ({"reason": event.text} if event.text else {})


def _call(call: Call, before: Sequence[Call], raw: bool) -> dict[str, Any]:
    """A call with the messages that its prompt adds to the call that it continues; `raw` with all of them."""
    function = {} if call.function == WORKFLOW else {"function": call.function}
    shown: dict[str, Any] = {"call": call.index, **function, "model": call.model}
    messages, completion = call.request.messages, call.completion
    earlier = next((other for other in reversed(before) if continues(messages, other)), None)
    if raw:
        shown["prompt"] = [jsonable(dict(message)) for message in messages]
        shown |= {} if completion is None else {"answer": jsonable(dict(completion.message))}
    else:
        if earlier is not None and earlier is not before[-1]:
            shown["continues"] = earlier.index
        known = 0 if earlier is None else len(earlier.request.messages) + 1
        shown["prompt"] = [_message(message) for message in messages[known:]]
        shown |= {} if completion is None else _message(completion.message)
    if call.error is not None:
        shown["error"] = call.error
    if completion is not None:
        shown["finish_reason"] = completion.finish_reason
    return shown


def _message(message: Message) -> dict[str, Any]:
    """The text of a message under its role, after its thinking, and the tool calls in it by name."""
    called = [_tool_call(wire) for wire in message.get("tool_calls") or ()]
    content = text_of(message) if is_text(message) else jsonable(message["content"])
    thinking = message.get("reasoning_content")
    shown: dict[str, Any] = {"thinking": thinking} if thinking else {}
    shown |= {str(message.get("role")): content} if content or not (called or thinking) else {}
    return shown | ({"tool_calls": called} if called else {})


def _tool_call(wire: Any) -> dict[str, Any]:
    """The name of a tool and its arguments; as text, where they are no JSON."""
    function = wire.get("function", {})
    arguments = function.get("arguments")
    try:
        return {str(function.get("name")): read_json(arguments, unique_keys=False)}
    except (TypeError, ValueError):
        return {str(function.get("name")): jsonable(arguments)}
