"""One episode and its siblings: what was said and done, in turns or as a tree, its scores and its calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from etude.algorithms.episodes import is_play
from etude.core.call import Call, continues
from etude.core.episode import WORKFLOW, EpisodeRecord, Event
from etude.core.errors import RequestError
from etude.core.message import Message, is_text, text_of
from etude.protocols.decision import WORDS, code_of
from etude.protocols.tree import EpisodeTree, Node
from etude.store.episodes import read_episode
from etude.store.journal import Journal
from etude.store.outline import EpisodeOutline, outlines
from etude.store.plain import jsonable
from etude.store.run_folder import RunFolder
from etude.view.episodes import split_id
from etude.view.pages import library_and_run, page


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing that was said or that happened."""

    kind: str
    """A role, `event` or `failure`."""
    who: str
    text: str = ""
    thinking: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Of each tool call `name` and `arguments`."""
    call: int | None = None
    """Index of the call that it is the answer of."""
    marks: tuple[str, ...] = ()
    """Facts in a word or two."""
    is_bad: bool = False


def turns_of(record: EpisodeRecord) -> list[Turn]:
    """The turns of an episode. Of a call that goes on from an earlier one, only what is new."""
    turns = [_event(event) for event in record.events if event.after_call < 0]
    events: dict[int, list[Event]] = {}
    for event in record.events:
        events.setdefault(event.after_call, []).append(event)
    for position, call in enumerate(record.calls):
        turns += _call(call, record.calls[:position])
        turns += [_event(event) for event in events.get(call.index, ())]
    if record.failure is not None:
        turns.append(Turn("failure", record.failure.kind, record.failure.reason, is_bad=True))
    return turns


def _call(call: Call, before: Sequence[Call]) -> Iterator[Turn]:
    messages = call.request.messages
    earlier = next((other for other in reversed(before) if continues(messages, other)), None)
    known = 0 if earlier is None else len(earlier.request.messages) + 1
    for message in messages[known:]:
        yield _said(message, str(message.get("role")))
    marks = []
    if earlier is not None and earlier is not before[-1]:
        marks.append(f"goes on from call {earlier.index}")
    who = call.model if call.function == WORKFLOW else call.function
    if call.completion is None:
        yield Turn(
            "failure", who, call.error or "no answer", call=call.index, marks=tuple(marks), is_bad=True
        )
        return
    answer = call.completion
    if answer.finish_reason == "length":
        marks.append("cut off")
    if answer.drifted:
        marks.append(f"drifted: {answer.fault or 'the template wrote the prompt anew'}")
    if call.retries:
        marks.append(f"asked {call.retries + 1} times")
    version = "from a log" if call.logged else f"v{answer.model_version}"
    yield _said(answer.message, who, call.index, (version, *marks))


def _said(message: Message, who: str, call: int | None = None, marks: Sequence[str] = ()) -> Turn:
    content = message.get("content")
    text = text_of(message) if is_text(message) else str(jsonable(content))
    tools = tuple(map(_tool_call, message.get("tool_calls") or ()))
    role = str(message.get("role") or "other")
    thinking = str(message.get("reasoning_content") or "")
    return Turn(role, who, text, thinking, tools, call, tuple(marks))


def _tool_call(wire: Any) -> Mapping[str, Any]:
    function = wire.get("function") if isinstance(wire, Mapping) else None
    function = function if isinstance(function, Mapping) else {}
    return {"name": str(function.get("name")), "arguments": function.get("arguments")}


def _event(event: Event) -> Turn:
    whose = "" if event.agent is None else f" of {event.agent}"
    if event.tool is not None:
        use, is_bad = event.tool, event.tool.outcome != "ok"
        marks = (use.outcome, f"{use.seconds:.2f} s") if is_bad else (f"{use.seconds:.2f} s",)
        return Turn("event", f"tool {use.name}", use.result if is_bad else "", marks=marks, is_bad=is_bad)
    if event.kind in ("step_reward", "score"):
        name = event.name or "step reward"
        return Turn(
            "event",
            f"{name}{whose}",
            event.text,
            marks=(f"{event.value:g}",) if event.value is not None else (),
        )
    return Turn("event", f"{event.kind}{whose}", event.text)


_COLOURS = 6


def shown_play(record: EpisodeRecord) -> dict[str, Any]:
    """The play of an episode as a page shows it. Raises RequestError when its output is no tree.

    `values` are each agent's earnings in the whole play, `agents` the numbers of their colours, `ways` in how
    many ways it went. Of an answer, `values` are what each agent earned from there on, on average over the
    branches, `gain` by how much it was worth more to its own than its siblings (None without these), and
    `heard_by` of a message the other agents in whose later prompts it stands.
    """
    tree = EpisodeTree.from_json(record.output)
    calls = {call.index: call for call in record.calls}
    prompts = {
        index: "\n".join(text_of(message) for message in call.request.messages)
        for index, call in calls.items()
    }

    def heard(node: Node, text: str) -> list[str]:
        later = {after.agent for after in _below(tree, node) if text.strip() in prompts.get(after.call, "")}
        return [agent for agent in tree.agents if agent in later - {node.agent}]

    def answer(node: Node) -> dict[str, Any]:
        call = calls.get(node.call)
        said = [
            {"channel": channel, "text": text, "heard_by": heard(node, text)}
            for channel, text in node.messages.items()
        ]
        decision = "" if node.decision is None else f"{WORDS[code_of(node.decision)]} ({node.decision:g})"
        return {
            "node": node,
            "said": said,
            "values": {agent: tree.value(node, agent) for agent in tree.agents},
            "gain": _gain(tree, node),
            "decision": decision,
            "thinking": "" if call is None or call.completion is None else call.completion.thinking,
            "following": [*map(answer, tree.children(node))],
        }

    return {
        "protocol": tree.protocol,
        "truth": WORDS[tree.truth],
        "stance": WORDS[tree.stance],
        "values": {agent: tree.value(None, agent) for agent in tree.agents},
        "agents": {agent: at % _COLOURS + 1 for at, agent in enumerate(tree.agents)},
        "ways": sum(1 for _ in tree.leaves()),
        "size": len(tree.nodes),
        "answers": [*map(answer, tree.children())],
    }


def _below(tree: EpisodeTree, node: Node) -> Iterator[Node]:
    for child in tree.children(node):
        yield child
        yield from _below(tree, child)


def _gain(tree: EpisodeTree, node: Node) -> float | None:
    parent = None if node.parent is None else tree.nodes[node.parent]
    others = [tree.value(each, node.agent) for each in tree.children(parent) if each.id != node.id]
    return tree.value(node, node.agent) - sum(others) / len(others) if others else None


_TURNS = 200
"""On one page."""
_SIBLINGS = 16


def episode_page(request: Request) -> Response:
    """One episode."""
    library, path = library_and_run(request)
    start = max(0, int(request.query_params.get("turn", "0") or 0))
    id, rewards = request.path_params["id"], library.rewards(path)
    with RunFolder.read(path) as run:
        record, (phase, _) = read_record(run, id), split_id(run.journal, id)
        turns = turns_of(record)
        context: dict[str, Any] = {
            "record": record,
            "phase": phase,
            "turns": turns[start : start + _TURNS],
            "more": start + _TURNS if len(turns) > start + _TURNS else 0,
            "play": _play_of(record),
            "scores": _scores(run.journal, id, rewards),
            "siblings": siblings_of(
                run.journal, phase, record.example.id, next(iter(rewards.values()), None)
            ),
        }
    template = "turns.html" if start else "episode.html"
    return page(request, template, run=path.name, tab="Episodes", **context)


def group_page(request: Request) -> Response:
    """The episodes of one example in a phase, side by side."""
    library, path = library_and_run(request)
    with RunFolder.read(path) as run:
        phase, example = split_id(run.journal, request.path_params["id"])
        siblings = siblings_of(run.journal, phase, example, library.reward(path))
        if not siblings:
            raise RequestError(f"run {run.name} has no episodes of the example '{example}' in {phase}")
        records = [read_record(run, sibling.id) for sibling in siblings[:_SIBLINGS]]
    shown = [
        (each, record, turns_of(record), _play_of(record))
        for each, record in zip(siblings, records, strict=False)
    ]
    context: dict[str, Any] = {
        "phase": phase,
        "example": records[0].example,
        "siblings": siblings,
        "shown": shown,
    }
    return page(request, "group.html", run=path.name, tab="Episodes", **context)


def read_record(run: RunFolder, id: str) -> EpisodeRecord:
    """The episode of an id. Raises RequestError where there is none."""
    record = read_episode(run.journal, id)
    if record is None:
        raise RequestError(f"run {run.name} has no finished episode '{id}'")
    return record


def siblings_of(journal: Journal, phase: str, example: str, reward: str | None) -> list[EpisodeOutline]:
    """The episodes of an example in a phase, in outline."""
    episodes = outlines(journal, f"{phase}/{example}/", reward)
    return sorted((each for each in episodes if each.example == example), key=lambda each: each.generation)


def _play_of(record: EpisodeRecord) -> dict[str, Any] | None:
    return shown_play(record) if is_play(record) and record.failure is None else None


def _scores(journal: Journal, id: str, rewards: Mapping[str | None, str]) -> list[dict[str, Any]]:
    """The evaluators' scores of an episode, each with whose reward it is: ` of prover`; None for nobody's."""
    prefix, scores = f"{id}/score/", []
    for key, stored in journal.scan(prefix):
        name = key.removeprefix(prefix)
        targets = [target for target, reward in rewards.items() if reward == name]
        whose = f" of {', '.join(filter(None, targets))}" if any(targets) else "" if targets else None
        told = {part: stored.get(part) for part in ("score", "reasoning", "error")}
        scores.append({"name": name, "reward_of": whose, **told})
    return scores
