"""Episodes read back from the journal."""

from __future__ import annotations

from collections.abc import Iterator

from etude.core.call import Call
from etude.core.episode import EpisodeRecord
from etude.core.errors import StoreError
from etude.core.example import Example
from etude.store.encode import decode_call, decode_episode, is_episode, parent_name
from etude.store.journal import Journal, Json


def call_key(episode_id: str, name: str) -> str:
    """The journal key of a call of an episode."""
    return f"{episode_id}/call/{name}"


class CallReader:
    """Reads the calls of one episode, which are stored as differences to each other."""

    def __init__(self, journal: Journal, episode_id: str) -> None:
        self._journal = journal
        self._episode_id = episode_id
        self._known: dict[str, Call] = {}

    def add(self, name: str, call: Call) -> None:
        """Have a call at hand that is being stored under `name`."""
        self._known[name] = call

    def read(self, name: str) -> Call:
        """The call stored under `name`. Raises StoreError when it is not in the journal."""
        pending: list[tuple[str, Json]] = []
        following: str | None = name
        while following is not None and following not in self._known:
            data = self._journal.get(call_key(self._episode_id, following))
            if data is None:
                raise StoreError(
                    f"{self._journal.path}: call {following} of episode {self._episode_id} is missing; "
                    f"the run database is incomplete, start a new run"
                )
            pending.append((following, data))
            following = parent_name(data)
        while pending:
            self.decode(*pending.pop())
        return self._known[name]

    def decode(self, name: str, data: Json) -> Call:
        """The call of JSON that was stored under `name`; its parents are read when they are needed."""
        above = parent_name(data)
        parent = None if above is None else self.read(above)
        call = self._known[name] = decode_call(data, self._episode_id, parent)
        return call


def read_episode(journal: Journal, episode_id: str, example: Example | None = None) -> EpisodeRecord | None:
    """The finished episode of that id, or None when there is none.

    `example` takes the place of the stored copy of the example, which for values that JSON cannot
    hold has only their description. Raises StoreError when the journal cannot be read.
    """
    data = journal.get(episode_id)
    return load_episode(journal, data, example) if is_episode(data) else None


def load_episode(journal: Journal, data: Json, example: Example | None = None) -> EpisodeRecord:
    """The episode of its journalled value, with its calls from the journal."""
    reader = CallReader(journal, data["episode"])
    calls = [
        reader.read(stored) if isinstance(stored, str) else decode_call(stored, data["episode"], None)
        for stored in data["calls"]
    ]
    return decode_episode(data, calls, example)


def iter_episodes(journal: Journal, prefix: str = "") -> Iterator[EpisodeRecord]:
    """All finished episodes whose id starts with `prefix`, in the order of their ids, one at a time."""
    for key, data in journal.scan(prefix):
        if is_episode(data) and data["episode"] == key:
            yield load_episode(journal, data)
