"""Episodes in the journal: reading one by its id or all of a phase, and listing the phases.

Phases with episodes are named `eval`, `validation/5` and `train/3`. `train/3.2` is the second collection of
its kind for an epoch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from etude.core.call import Call
from etude.core.episode import EpisodeRecord, Example
from etude.core.errors import RequestError, StoreError
from etude.store.encode import decode_call, decode_episode, encode_call, encode_episode, parent_name
from etude.store.journal import Journal, Json, Steps

EVALUATION = "eval"
"""The phase of `etude evaluate`."""

_PHASE = re.compile(r"(train|validation)/(\d+)([^.]*)(?:\.(\d+))?")


def call_key(episode_id: str, name: str) -> str:
    """Return the journal key of an episode's call."""
    return f"{episode_id}/call/{name}"


def tool_key(episode_id: str, name: str) -> str:
    """Return the journal key of an episode's tool call."""
    return f"{episode_id}/tool/{name}"


def episode_scores(journal: Journal, episode_id: str) -> dict[str, Json]:
    """Return the result of each evaluator for an episode: `score`, `reasoning`, `error`."""
    prefix = f"{episode_id}/score/"
    return {key.removeprefix(prefix): stored for key, stored in journal.scan(prefix)}


class CallReader:
    """Reads the calls of one episode, which are stored as differences to each other."""

    def __init__(self, journal: Steps, episode_id: str) -> None:
        self._journal = journal
        self._episode_id = episode_id
        self._known: dict[str, Call] = {}

    def add(self, name: str, call: Call) -> None:
        """Remember a call that is being stored under `name`."""
        self._known[name] = call

    def read(self, name: str) -> Call:
        """Return the call stored under `name`. Raises StoreError when it is not in the journal."""
        pending: list[tuple[str, Json]] = []
        following: str | None = name
        while following is not None and following not in self._known:
            data = self._journal.get(call_key(self._episode_id, following))
            if data is None:
                raise StoreError(
                    f"{self._journal.path}: call {following} of episode {self._episode_id} is missing, so "
                    f"the run's database is incomplete; start a new run"
                )
            pending.append((following, data))
            following = parent_name(data)
        while pending:
            self.decode(*pending.pop())
        return self._known[name]

    def decode(self, name: str, data: Json) -> Call:
        """Decode a call that was stored under `name`. Unknown parents are read from the journal."""
        above = parent_name(data)
        parent = None if above is None else self.read(above)
        call = self._known[name] = decode_call(data, self._episode_id, parent)
        return call


def read_episode(journal: Steps, episode_id: str, example: Example | None = None) -> EpisodeRecord | None:
    """Return the finished episode with this id, or None. `example` replaces the one that was stored."""
    data = journal.get(episode_id)
    return _decoded(journal, data, example) if is_episode(data) else None


async def write_episode(journal: Steps, record: EpisodeRecord) -> None:
    """Store an episode that was not played here, each call as its difference to the one before."""
    names: dict[int, str] = {}
    before: tuple[str, Call] | None = None
    for call in record.calls:
        if call.completion is not None:
            names[call.index] = name = f"logged/{call.index}"
            await journal.put(call_key(record.id, name), encode_call(call, before))
            before = name, call
    await journal.put(record.id, encode_episode(record, names))


def is_episode(data: Json) -> bool:
    """Return whether an entry of the journal is a finished episode."""
    return isinstance(data, dict) and "episode" in data and "calls" in data


def _decoded(journal: Steps, data: Json, example: Example | None = None) -> EpisodeRecord:
    reader = CallReader(journal, data["episode"])
    calls = [
        reader.read(stored) if isinstance(stored, str) else decode_call(stored, data["episode"], None)
        for stored in data["calls"]
    ]
    return decode_episode(data, calls, example)


def stored_episodes(journal: Journal, prefix: str = "") -> Iterator[tuple[str, Json]]:
    """Yield the ids and JSON of the finished episodes whose id starts with `prefix`, in the order of ids."""
    for key, data in journal.scan(prefix):
        if is_episode(data) and data["episode"] == key:
            yield key, data


def iter_episodes(journal: Journal, prefix: str = "", *, phase: str | None = None) -> Iterator[EpisodeRecord]:
    """Yield the finished episodes whose id starts with `prefix`, or those of a `phase`, in order."""
    for _, data in stored_episodes(journal, prefix if phase is None else f"{phase}/"):
        if phase is None or episode_phase(data) == phase:
            yield _decoded(journal, data)


def episode_phase(data: Json) -> str:
    """Return the phase of a stored episode."""
    return str(data["episode"]).removesuffix(f"/{data['example']['id']}/{data['generation']}")


_IS_EPISODE = "substr(value, 1, 12) = '{\"episode\": '"
"""Matches the output of `encode_episode`. Nothing else in a journal begins like it."""
_NEXT = f"SELECT key, value FROM steps WHERE key >= ? AND {_IS_EPISODE} ORDER BY key LIMIT 1"


def list_phases(journal: Journal) -> list[str]:
    """Return the phases that have episodes, in the order of `latest_first`. Reads one episode of each."""
    phases: list[str] = []
    first = ""
    while rows := journal.select(_NEXT, (first,)):
        phases.append(episode_phase(json.loads(rows[0][1])))
        first = f"{phases[-1]}0"  # "0" sorts after "/", so this skips the rest of the phase.
    return sorted(phases, key=latest_first)


def choose_phase(journal: Journal, wish: str | None) -> str:
    """Return the phase `wish`, or the latest one. Raises RequestError if there is none."""
    phases = list_phases(journal)
    if not phases:
        raise RequestError(f"{journal.path} has no episodes yet")
    if wish is not None and wish not in phases:
        raise RequestError(f"there are no episodes of the phase '{wish}'; there are: {', '.join(phases)}")
    return wish or phases[0]


def phase_epoch(phase: str) -> int | None:
    """Return the epoch, from 0, that a phase was collected for, or None if it is no training phase."""
    match = _PHASE.fullmatch(phase)
    return int(match[2]) - 1 if match is not None and match[1] == "train" else None


def latest_first(phase: str) -> tuple[int, int, str, int]:
    """Sort key for phases: evaluations, validations, training, each latest first. The warm-up is last."""
    match = _PHASE.fullmatch(phase)
    if match is None:
        return (0 if phase == EVALUATION else 4 if phase.startswith("warm-up/") else 1, 0, phase, 0)
    return (2 if match[1] == "validation" else 3, -int(match[2]), match[3], -int(match[4] or 1))
