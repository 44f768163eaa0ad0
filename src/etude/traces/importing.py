"""Writing the chats of a log into a run folder, where they can be looked at, scored and learned from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.store.episodes import write_episode
from etude.store.facts import IMPORT
from etude.store.journal import Journal
from etude.store.run_folder import RunFolder
from etude.traces.conversations import HELD_OUT, Log, episodes_of
from etude.traces.files import read_records

_AT_ONCE = 256
"""Episodes that are written in one go."""


@dataclass(frozen=True, slots=True)
class Imported:
    """The chats that were found in a log."""

    files: list[str]
    chats: int = 0
    calls: int = 0
    failed: int = 0
    """Chats that ended in an error."""
    prompts: int = 0
    """Different prompts that chats began with."""
    compared: int = 0
    """Of these, the ones that several chats began with."""
    held_out: int = 0
    """Of these, the ones that are held out."""
    scores: dict[str, int] = field(default_factory=dict)
    """Chats with feedback, by its name."""
    left_out: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Parts of the log that make no chat: by the reason how many, and where the first one is."""

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON."""
        left_out = {reason: {"count": n, "first": first} for reason, (n, first) in self.left_out.items()}
        return {**asdict(self), "left_out": left_out}


def read_log(
    files: Sequence[Path], *, format: str | None = None, skip_broken: bool = False, hold_out: float = 0.2
) -> tuple[list[EpisodeRecord], Imported]:
    """The chats of a log as episodes, and their counts. Raises DatasetError, and RequestError for none."""
    log = Log()
    for file in files:
        log.add(read_records(file, format, skip_broken=skip_broken))
    episodes = [*episodes_of(log.chats(), hold_out)]
    left_out = {reason: (n, log.left_out.first[reason]) for reason, n in log.left_out.counts.most_common()}
    if not episodes:
        reasons = "".join(f"\n  {reason}: {n}, first at {at}" for reason, (n, at) in left_out.items())
        raise RequestError(f"there are no chats in {', '.join(map(str, files))}{reasons}")
    sizes = Counter(episode.example.id for episode in episodes)
    held_out = {episode.example.id for episode in episodes if episode.id.startswith(f"{HELD_OUT}/")}
    scores = Counter(name for episode in episodes for name in {event.name for event in episode.events})
    return episodes, Imported(
        files=[*map(str, files)],
        chats=len(episodes),
        calls=sum(len(episode.calls) for episode in episodes),
        failed=sum(episode.failure is not None for episode in episodes),
        prompts=len(sizes),
        compared=sum(size > 1 for size in sizes.values()),
        held_out=len(held_out),
        scores=dict(scores),
        left_out=left_out,
    )


async def write_run(run: RunFolder, episodes: Iterable[EpisodeRecord], imported: Imported) -> None:
    """Store the episodes in a new run folder, and last of all what was found. Raises StoreError."""
    rest = iter(episodes)
    while some := list(islice(rest, _AT_ONCE)):
        await asyncio.gather(*(_write(run.journal, episode) for episode in some))
    await run.journal.put(IMPORT, imported.as_json())


async def _write(journal: Journal, episode: EpisodeRecord) -> None:
    """An episode with its feedback, which counts as the scores that it has in its run."""
    for event in episode.events:
        score = {"score": event.value, "reasoning": event.text or None, "error": None}
        await journal.put(f"{episode.id}/score/{event.name}", score)
    await write_episode(journal, episode)
