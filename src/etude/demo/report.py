"""The outcome of a demo: figures before and after training, and some episodes in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.json_text import JsonError, read_json
from etude.core.keys import generator
from etude.core.message import Message
from etude.loop.evaluation import Evaluation
from etude.store.episodes import read_episode
from etude.store.journal import Journal

_SHOWN = 3
_LINE = 160
_LINES = 8


@dataclass(frozen=True, slots=True)
class Shown:
    """An example with the agent's episode before training and after, in words."""

    example: str
    before: list[str]
    after: list[str]


@dataclass(frozen=True, slots=True)
class Variant:
    """The agent in other circumstances than those it was trained in, before training and after."""

    name: str
    before: dict[str, Any]
    after: dict[str, Any]


@dataclass(frozen=True, slots=True)
class DemoReport:
    """The outcome of a demo. Evaluations are as `Evaluation.as_json` has them."""

    folder: Path
    run: Path
    """The run folder of the training."""
    before: dict[str, Any]
    after: dict[str, Any]
    greedy: dict[str, Any]
    """After training, at temperature 0."""
    variants: list[Variant]
    episodes: list[Shown]
    plot: Path
    model: Path
    """The trained model, as a folder that `transformers` loads."""
    seconds: float


def shown_episodes(
    journal: Journal, phases: tuple[str, str], before: Evaluation, after: Evaluation, seed: int
) -> list[Shown]:
    """Three examples with their episodes in both phases: those first that training helped most."""
    earlier, later = _scores(before), _scores(after)
    names = [name for name in earlier if name in later]
    generator(seed, "shown").shuffle(names)
    names.sort(key=lambda name: (earlier[name] or 0.0) - (later[name] or 0.0))

    def in_words(phase: str, name: str, score: float | None) -> list[str]:
        record = read_episode(journal, f"{phase}/{name}/0")
        return [] if record is None else episode_in_words(record, score)

    return [
        Shown(name, in_words(phases[0], name, earlier[name]), in_words(phases[1], name, later[name]))
        for name in names[:_SHOWN]
    ]


def _scores(evaluation: Evaluation) -> dict[str, float | None]:
    items = evaluation.output.results_of(str(evaluation.reward))
    return {item.id: item.score if item.is_scored else None for item in items}


def episode_in_words(record: EpisodeRecord, score: float | None) -> list[str]:
    """Messages and tool calls, a line each, and how the episode was scored."""
    lines = list(_lines(record.calls))
    if len(lines) > _LINES:
        left_out = len(lines) - _LINES + 1
        lines = [*lines[: _LINES // 2], f"… {left_out} more …", *lines[len(lines) - _LINES // 2 + 1 :]]
    if record.failure is not None:
        lines.append(f"failed: {record.failure.reason}")
    if record.output is not None and record.output != _last_said(record.calls):
        lines.append(f"outcome: {_short(record.output)}")
    lines.append("no reward" if score is None else f"reward {score:g}")
    return lines


def _lines(calls: Sequence[Call]) -> Iterator[str]:
    seen: tuple[Message, ...] = ()
    for call in calls:
        messages = call.request.messages
        new = messages[len(seen) :] if messages[: len(seen)] == seen else messages
        for message in new:
            if message.get("role") != "assistant":
                yield f"{message.get('role')}: {_short(message.get('content'))}"
        seen = messages
        if call.completion is None:
            yield f"no answer: {call.error}"
        else:
            yield from _answer(call.completion.message)
            seen = (*messages, call.completion.message)


def _last_said(calls: Sequence[Call]) -> object:
    completion = calls[-1].completion if calls else None
    return None if completion is None else completion.message.get("content")


def _answer(message: Message) -> Iterator[str]:
    if message.get("reasoning_content"):
        yield f"agent thinks: {_short(message['reasoning_content'])}"
    for tool_call in message.get("tool_calls") or ():
        function = tool_call["function"]
        yield f"agent calls {function['name']}({_arguments(function['arguments'])})"
    if message.get("content"):
        yield f"agent: {_short(message['content'])}"


def _arguments(text: str) -> str:
    try:
        arguments = read_json(text, unique_keys=False)
    except JsonError:
        arguments = None
    if not isinstance(arguments, dict):
        return _short(text)
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _short(value: object) -> str:
    whole_text = str(value if value is not None else "").strip()
    text = " / ".join(" ".join(line.split()) for line in whole_text.splitlines())
    text = "".join(letter if letter.isprintable() else "·" for letter in text)
    return text if len(text) <= _LINE else f"{text[: _LINE - 1]}…"
