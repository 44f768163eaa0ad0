"""One episode and its siblings: what was said and done, what it was worth, and its calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from etude.algorithms.episodes import is_play
from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.store.episodes import read_episode
from etude.store.journal import Journal
from etude.store.outline import EpisodeOutline, outlines, phases_in
from etude.store.run_folder import RunFolder
from etude.view.episodes import split_id
from etude.view.library import Library
from etude.view.pages import page
from etude.view.plays import Play, shown_play
from etude.view.turns import differences, turns_of

_TURNS = 200
"""On one page."""
_SIBLINGS = 16


@dataclass(frozen=True, slots=True)
class Score:
    """An evaluator's score of an episode."""

    name: str
    score: float | None
    reasoning: Any
    error: str | None
    reward_of: str | None
    """None where it is no reward; else whose it is, of several targets: ` of prover`."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call, and when its answer was stored."""

    call: Call
    after: float | None
    """Seconds from the beginning of the episode."""


def episode_page(request: Request) -> Response:
    """One episode."""
    library: Library = request.app.state.library
    path = library.find(request.path_params["run"])
    start = max(0, int(request.query_params.get("turn", "0") or 0))
    with RunFolder.read(path) as run:
        context = episode_context(run, request.path_params["id"], library.rewards(path), start)
    template = "turns.html" if start else "episode.html"
    return page(request, template, run=path.name, tab="Episodes", **context)


def episode_context(
    run: RunFolder, id: str, rewards: Mapping[str | None, str], start: int = 0
) -> dict[str, Any]:
    """All that the page of an episode shows; of its turns a page from `start` on. Raises RequestError."""
    record = read_record(run, id)
    phase, _ = split_id(run.journal, id)
    turns = turns_of(record)
    return {
        "record": record,
        "phase": phase,
        "turns": turns[start : start + _TURNS],
        "more": start + _TURNS if len(turns) > start + _TURNS else 0,
        "play": _play_of(record),
        "scores": _scores(run.journal, id, rewards),
        "calls": _timed(run.journal, record),
        "siblings": siblings_of(run.journal, phase, record.example.id, next(iter(rewards.values()), None)),
    }


def group_page(request: Request) -> Response:
    """The episodes of one example in a phase, side by side."""
    library: Library = request.app.state.library
    path = library.find(request.path_params["run"])
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


def example_page(request: Request) -> Response:
    """One example in all phases, and two of its episodes with what differs between them."""
    library: Library = request.app.state.library
    path = library.find(request.path_params["run"])
    example, reward = request.path_params["example"], library.reward(path)
    with RunFolder.read(path) as run:
        phases = [*reversed(phases_in(run.journal))]
        rows = [(phase, own) for phase in phases if (own := siblings_of(run.journal, phase, example, reward))]
        if not rows:
            raise RequestError(f"run {run.name} has no episodes of the example '{example}'")
        rows.sort(key=lambda row: min(row[1][0].versions, default=0))
        before = request.query_params.get("from") or rows[0][1][0].id
        after = request.query_params.get("to") or rows[-1][1][-1].id
        old, new = read_record(run, before), read_record(run, after)
    context: dict[str, Any] = {"example": new.example, "rows": rows, "before": before, "after": after}
    context["differences"] = differences(turns_of(old), turns_of(new))
    context["outlines"] = {each.id: each for _, own in rows for each in own}
    return page(request, "example.html", run=path.name, tab="Episodes", **context)


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


def _play_of(record: EpisodeRecord) -> Play | None:
    """The play of a protocol's episode."""
    return shown_play(record) if is_play(record) and record.failure is None else None


def _scores(journal: Journal, id: str, rewards: Mapping[str | None, str]) -> list[Score]:
    prefix = f"{id}/score/"

    def reward_of(name: str) -> str | None:
        targets = [target for target, reward in rewards.items() if reward == name]
        return f" of {', '.join(filter(None, targets))}" if any(targets) else "" if targets else None

    return [
        Score(name, stored.get("score"), stored.get("reasoning"), stored.get("error"), reward_of(name))
        for key, stored in journal.scan(prefix)
        if (name := key.removeprefix(prefix))
    ]


def _timed(journal: Journal, record: EpisodeRecord) -> list[TimedCall]:
    """The calls, each with when it was stored."""
    rows = journal.select(
        "SELECT key, created FROM steps WHERE key >= ? AND key < ?", (record.id, f"{record.id}0")
    )
    created = dict(rows)
    begun = created[record.id] - record.seconds
    names = journal.get(record.id)["calls"]
    # Calls that failed for good have no entry of their own.
    stored = [created[f"{record.id}/call/{name}"] if isinstance(name, str) else None for name in names]
    return [
        TimedCall(call, None if at is None else max(0.0, at - begun))
        for call, at in zip(record.calls, stored, strict=True)
    ]
