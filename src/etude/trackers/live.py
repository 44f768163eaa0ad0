"""The episodes that are over and scored: found in the journal while the run goes on, a few keys at a time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator

from etude.store.episodes import is_episode
from etude.store.journal import Journal

_PART = re.compile(r"(train|validation)/\d+")
_PAGE = 10_000


def part_of(episode_id: str) -> str:
    """The part of a run that an episode belongs to: `train/3`, `validation/5`, `warm-up`, `eval`."""
    match = _PART.match(episode_id)
    return episode_id.partition("/")[0] if match is None else match[0]


class EpisodeFeed:
    """Tells which episodes a tracker has not been shown.

    What was shown is known to this process alone: one that goes on with a run shows those of the part that is
    under way again.
    """

    def __init__(self, evaluators: Collection[str]) -> None:
        """`evaluators` are those that score every episode that has an output."""
        self._evaluators = evaluators
        self._last_row = 0
        self._ready: dict[str, None] = {}
        self._shown = defaultdict[str, set[str]](set)
        self._over: set[str] = set()

    def ready(self, journal: Journal) -> list[str]:
        """The ids of those that have failed, or have all their scores, in the order in which they came."""
        # The last score that comes is a new key too.
        for name in dict.fromkeys(map(_episode_of, self._new_keys(journal))):
            is_news = name is not None and part_of(name) not in self._over and not self._was_shown(name)
            if name is not None and is_news and self._is_ready(journal, name):
                self._ready[name] = None
        return [*self._ready]

    def rest(self, journal: Journal, part: str) -> Iterator[str]:
        """The ids of all others of a part that is over, also of those without a score."""
        for key in journal.times(part):
            is_other = part_of(key) == part and _episode_of(key) == key and not self._was_shown(key)
            if is_other and is_episode(journal.get(key)):
                yield key

    def shown(self, names: Collection[str]) -> None:
        """The tracker has been shown these."""
        for name in names:
            self._shown[part_of(name)].add(name)
            self._ready.pop(name, None)

    def end(self, part: str) -> None:
        """All of a part was shown. Of the last such part names are kept: several models may have trained."""
        for other in self._over - {part}:
            self._shown.pop(other, None)
        self._over.add(part)
        self._ready = {name: None for name in self._ready if part_of(name) != part}

    def _was_shown(self, name: str) -> bool:
        return name in self._shown.get(part_of(name), ())

    def _is_ready(self, journal: Journal, name: str) -> bool:
        stored = journal.get(name)
        if not is_episode(stored):
            return False
        if stored["failure"] is not None:
            return True
        scores = [journal.get(f"{name}/score/{each}") for each in self._evaluators]
        # Scores that an evaluator failed to give may be made again.
        return bool(scores) and all(row is not None and row.get("error") is None for row in scores)

    def _new_keys(self, journal: Journal) -> Iterator[str]:
        """Keys stored since the last time. One that takes the row of a deleted key may be missed."""
        while True:
            rows = journal.select(
                f"SELECT rowid, key FROM steps WHERE rowid > {self._last_row} ORDER BY rowid LIMIT {_PAGE}"
            )
            for self._last_row, key in rows:
                yield key
            if len(rows) < _PAGE:
                return


def _episode_of(key: str) -> str | None:
    """The id of the episode that a key may be of or be a score of."""
    name, is_score, _ = key.partition("/score/")
    if not is_score and ("/call/" in key or "/tool/" in key):
        return None
    return name if name.rpartition("/")[2].isdecimal() else None
