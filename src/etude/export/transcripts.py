"""Transcripts of stored episodes, as a person reads them.

A play is shown as a transcript of its protocol; any other episode by its calls, what happened between
them, and what came of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from etude.algorithms.episodes import is_play
from etude.core.call import Call, continues
from etude.core.episode import WORKFLOW, EpisodeRecord, Event
from etude.core.errors import RequestError
from etude.core.json_text import read_json
from etude.core.message import Message, is_text, text_of
from etude.protocols.tree import as_yaml, transcript
from etude.store.episodes import read_episode
from etude.store.journal import Journal
from etude.store.plain import jsonable
from etude.store.run_folder import RunFolder
from etude.store.stored_config import reward_name, stored_data


def episode_transcript(run: RunFolder, episode: str) -> str:
    """The transcript of an episode as YAML, by its id.

    Raises RequestError when the run has no such episode.
    """
    record = read_episode(run.journal, episode)
    if record is None:
        raise RequestError(
            f"run {run.name} has no episode '{episode}'; an episode is named by its phase, example and "
            f"generation. `etude episodes {run.path}` lists them"
        )
    rewarded = reward_name(stored_data(run.path, required=False))
    shown = transcript(record) if is_play(record) else _conversation(record)
    return as_yaml(shown | _scores(run.journal, record.id, rewarded))


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


def _conversation(record: EpisodeRecord) -> dict[str, Any]:
    """Calls and events in order, then the output or the failure.

    Of a call that continues an earlier one only the new messages are shown.
    """
    example = record.example
    shown: dict[str, Any] = {
        "episode": record.id,
        "example": example.id,
        "inputs": jsonable(dict(example.inputs)),
        "expected": jsonable(example.expected),
        "turns": _turns(record),
    }
    if record.failure is not None:
        return shown | {"failure": f"{record.failure.kind}: {record.failure.reason}"}
    return shown | {"output": jsonable(record.output)}


def _turns(record: EpisodeRecord) -> list[dict[str, Any]]:
    """The calls, each followed by what happened before the next."""
    turns = [_event(event) for event in record.events if event.after_call < 0]
    for position, call in enumerate(record.calls):
        turns.append(_call(call, record.calls[:position]))
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


def _call(call: Call, before: Sequence[Call]) -> dict[str, Any]:
    """A call with the messages that its prompt adds to the call that it continues."""
    function = {} if call.function == WORKFLOW else {"function": call.function}
    shown: dict[str, Any] = {"call": call.index, **function, "model": call.model}
    messages, completion = call.request.messages, call.completion
    earlier = next((other for other in reversed(before) if continues(messages, other)), None)
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
