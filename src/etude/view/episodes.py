"""Lists of episodes: the phases of a run, the groups of a phase, and what a filter finds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from etude.core.errors import RequestError
from etude.core.history import Entry, EpochEntry
from etude.store.episodes import epoch_of, phases_of
from etude.store.figures import shown_reward
from etude.store.journal import Journal
from etude.store.log import histories
from etude.store.outline import WORDS, EpisodeOutline, find_episodes, outlines, parse_query
from etude.store.run_folder import RunFolder
from etude.view.pages import library_and_run, page

GROUPS, EPISODES = 40, 100
"""On one page."""
_SECONDS = 0.4
"""That one page may look for episodes. Where it finds too few, the next page looks on."""


@dataclass(frozen=True, slots=True)
class Group:
    """The episodes of one example in a phase."""

    example: str
    episodes: list[EpisodeOutline] = field(default_factory=list)

    @property
    def rewards(self) -> list[float]:
        """Of those that have one."""
        return [episode.reward for episode in self.episodes if episode.reward is not None]

    @property
    def failed(self) -> int:
        """Episodes without an output."""
        return sum(episode.failure is not None for episode in self.episodes)


def phases_page(request: Request) -> Response:
    """The phases of a run that have episodes; with a filter, what it finds in all of them."""
    library, path = library_and_run(request)
    query = request.query_params.get("q", "").strip()
    with RunFolder.read(path) as run:
        phases = phases_of(run.journal)
        if query:
            return _filtered_page(request, run.journal, path.name, phases, library.reward(path), None)
        entries = _entries(run.journal, run.name)
    rows = [(phase, entries.get(_kin_of(phase))) for phase in phases]
    return page(
        request, "phases.html", run=path.name, tab="Episodes", up=True, rows=rows, query="", words=WORDS,
        reward=shown_reward,
    )  # fmt: skip


def phase_page(request: Request) -> Response:
    """The groups of a phase; with a filter, the episodes that it finds."""
    library, path = library_and_run(request)
    phase, after = request.path_params["phase"], request.query_params.get("after", "")
    with RunFolder.read(path) as run:
        phases = phases_of(run.journal)
        if phase not in phases:
            raise RequestError(f"run {run.name} has no episodes of the phase '{phase}'")
        if request.query_params.get("q", "").strip():
            return _filtered_page(request, run.journal, path.name, [phase], library.reward(path), phase)
        entry = _entries(run.journal, run.name).get(_kin_of(phase))
        groups = [*islice(groups_of(run.journal, phase, library.reward(path), after), GROUPS + 1)]
    rewards = [reward for group in groups for reward in group.rewards]
    more = groups[GROUPS - 1].episodes[-1].id if len(groups) > GROUPS else ""
    context: dict[str, Any] = {
        **_around(phases, phase),
        "run": path.name,
        "tab": "Episodes",
        "phase": phase,
        "entry": entry,
        "groups": groups[:GROUPS],
        "rewards": rewards,
        "rewarded": library.reward(path) if len(library.rewards(path)) > 1 else None,
        "more": more,
        "query": "",
        "words": WORDS,
        "reward": shown_reward,
    }
    return page(request, "groups.html" if after else "phase.html", **context)


def groups_of(journal: Journal, phase: str, reward: str | None, after: str = "") -> Iterator[Group]:
    """The groups of a phase in the order of their examples' ids, after that of an episode."""
    episodes = outlines(journal, f"{phase}/", reward, after=after)
    for example, own in groupby(episodes, lambda episode: episode.example):
        yield Group(example, sorted(own, key=lambda episode: episode.generation))


def split_id(journal: Journal, id: str) -> tuple[str, str]:
    """The phase, and what comes after it, of an address within a run. Raises RequestError."""
    fits = [phase for phase in phases_of(journal) if id.startswith(f"{phase}/")]
    if not fits:
        raise RequestError(f"there is no phase that '{id}' begins with")
    phase = max(fits, key=len)
    return phase, id.removeprefix(f"{phase}/")


def _filtered_page(
    request: Request, journal: Journal, run: str, phases: list[str], reward: str | None, phase: str | None
) -> Response:
    query = parse_query(request.query_params["q"])
    after, start = request.query_params.get("after", ""), request.query_params.get("from")
    left = phases[phases.index(start) :] if start in phases else phases
    selection = find_episodes(journal, left, reward, query, after=after, limit=EPISODES, seconds=_SECONDS)
    context: dict[str, Any] = {"run": run, "tab": "Episodes", "phase": phase, "selection": selection}
    context |= {"words": WORDS}
    context |= {"query": query.words, **_around(phases, phase)}
    return page(request, "filtered_rows.html" if after else "filtered.html", **context)


def _around(phases: Sequence[str], phase: str | None) -> dict[str, str | None]:
    """The phases of the same kind before and after one, in time."""
    kin = [each for each in phases if phase is not None and each.partition("/")[0] == phase.partition("/")[0]]
    at = kin.index(phase) if phase in kin else 0
    before = kin[at + 1] if phase is not None and at + 1 < len(kin) else None
    return {"before": before, "following": kin[at - 1] if at > 0 else None}


def _kin_of(phase: str) -> str:
    """The phase without the label that tells some of an epoch's episodes from its others."""
    epoch = epoch_of(phase)
    return phase if epoch is None else f"train/{epoch + 1}"


def _entries(journal: Journal, run: str) -> dict[str, Entry]:
    """By phase: the epoch or the validation that it was collected for."""
    entries: dict[str, Entry] = {}
    for history in histories(journal, run).values():
        for entry in history.entries:
            kind = "train" if isinstance(entry, EpochEntry) else "validation"
            entries.setdefault(f"{kind}/{entry.epoch}", entry)
    return entries
