"""The turns of an episode as a page shows them, and its transcript.

A play is shown as the nodes of its tree, other episodes as calls and events in order, with their result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from etude.algorithms.samples import is_play
from etude.core.episode import WORKFLOW, AddedCall, EpisodeRecord, Event, in_order
from etude.core.json_text import jsonable
from etude.core.message import Message, is_text, message_text, with_parsed_arguments
from etude.protocols.tree import EpisodeTree
from etude.store.episodes import episode_scores, require_episode
from etude.store.run_folder import RunFolder
from etude.store.stored_config import reward_names


@dataclass(frozen=True, slots=True)
class Turn:
    """One message or event of an episode."""

    kind: str
    """A role, `event` or `failure`."""
    who: str
    text: str = ""
    thinking: str = ""
    tools: tuple[tuple[str, Any], ...] = ()
    """The name and the arguments of each tool call."""
    call: int | None = None
    """Index of the call that this answers."""
    marks: tuple[str, ...] = ()
    """Facts in a word or two."""
    is_bad: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the turn for a transcript."""
        call = [] if self.call is None else [f"call {self.call}"]
        about = ", ".join((*call, *self.marks))
        if self.kind == "event":
            return {self.who: "; ".join(filter(None, (about, self.text)))}
        who = f"{self.who} failed" if self.kind == "failure" else self.who
        tools = [{name: arguments} for name, arguments in self.tools]
        shown = {"thinking": self.thinking, who: self.text, "tool_calls": tools, "about": about}
        return {name: value for name, value in shown.items() if value or name == who}


def list_turns(record: EpisodeRecord) -> list[Turn]:
    """Return the turns of an episode. A call that continues an earlier one adds only its new messages."""
    turns: list[Turn] = []
    for each in in_order(record):
        turns += [_event(each)] if isinstance(each, Event) else _call(each)
    return turns


def _call(added: AddedCall) -> Iterator[Turn]:
    call, answer = added.call, added.call.completion
    for message in added.messages:
        yield _message(message, str(message.get("role")))
    marks = [] if added.continues is None else [f"continues call {added.continues}"]
    who = call.model if call.function == WORKFLOW else call.function
    if answer is None:
        text = call.error or "no answer"
        yield Turn("failure", who, text, call=call.index, marks=tuple(marks), is_bad=True)
        return
    if answer.finish_reason == "length":
        marks.append("cut off")
    if answer.drifted:
        marks.append(f"drifted: {answer.fault or 'the template wrote the prompt anew'}")
    if call.retries:
        marks.append(f"asked {call.retries + 1} times")
    version = "from a log" if call.logged else f"v{answer.model_version}"
    yield _message(answer.message, who, call.index, (version, *marks))


def _message(message: Message, who: str, call: int | None = None, marks: Sequence[str] = ()) -> Turn:
    return Turn(
        kind=str(message.get("role") or "other"),
        who=who,
        text=message_text(message) if is_text(message) else str(jsonable(message.get("content"))),
        thinking=str(message.get("reasoning_content") or ""),
        tools=tuple(_tool_call(wire.get("function") or {}) for wire in message.get("tool_calls") or ()),
        call=call,
        marks=tuple(marks),
    )


def _tool_call(function: Mapping[str, Any]) -> tuple[str, Any]:
    """Return a tool call's name and arguments. Arguments that are no text of JSON stay as they are."""
    return str(function.get("name")), jsonable(with_parsed_arguments(function)["arguments"])


def _event(event: Event) -> Turn:
    whose = "" if event.agent is None else f" of {event.agent}"
    if event.tool is not None:
        use, is_bad = event.tool, event.tool.outcome != "ok"
        marks = (*([use.outcome] if is_bad else []), f"{use.seconds:.2f} s")
        return Turn("event", f"tool {use.name}", use.result if is_bad else "", marks=marks, is_bad=is_bad)
    if event.kind in ("step_reward", "score"):
        value = () if event.value is None else (f"{event.value:g}",)
        return Turn("event", f"{event.name or 'step reward'}{whose}", event.text, marks=value)
    return Turn("event", f"{event.kind}{whose}", event.text)


def episode_transcript(run: RunFolder, episode: str) -> str:
    """Return an episode's transcript as YAML. Raises RequestError if there is no such episode."""
    record = require_episode(run, episode)
    inputs, expected = jsonable(dict(record.example.inputs)), jsonable(record.example.expected)
    shown = {"episode": record.id, "example": record.example.id, "inputs": inputs, "expected": expected}
    if record.failure is not None:
        shown["failure"] = f"{record.failure.kind}: {record.failure.reason}"
    if is_play(record):
        shown |= EpisodeTree.from_json(record.output).to_json()
    else:
        shown["turns"] = [turn.as_json() for turn in list_turns(record)]
        if record.failure is None:
            shown["output"] = jsonable(record.output)
    stored = episode_scores(run.journal, record.id)
    rewarded = reward_names(run.path).get(None, "")
    if (reward := stored.get(rewarded, {}).get("score")) is not None:
        shown["reward"] = reward
    if stored:
        shown["scores"] = {
            name: row["score"]
            if not (row.get("reasoning") or row.get("error"))
            else {key: row[key] for key in ("score", "reasoning", "error") if row.get(key) is not None}
            for name, row in stored.items()
        }
    return yaml.dump(
        shown, Dumper=_Dumper, sort_keys=False, allow_unicode=True, explicit_start=True, width=100
    )


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that writes multi-line text as a block."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A YAML block cannot hold trailing spaces: with them, the dumper would quote the whole text.
    lines = "\n".join(line.rstrip() for line in text.split("\n")) if "\n" in text else text
    return dumper.represent_scalar("tag:yaml.org,2002:str", lines, style="|" if "\n" in lines else None)


_Dumper.add_representer(str, _represent_text)
