"""Trying again what failed through no fault of the agent's: its steps are forgotten, and so taken anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from etude.core.episode import Failure
from etude.store.episodes import is_episode
from etude.store.journal import Journal


async def forget_failures(journal: Journal, is_open: Callable[[str], bool]) -> Counter[str]:
    """Forget failures that were not the agent's own; how many there were of each kind.

    These are episodes whose model did not answer, and scores that an evaluator failed to give
    (`score:<evaluator>`). Of an episode only its end is forgotten: calls that were answered are kept.
    Only episodes are looked at for whose id `is_open` is true. Raises StoreError.
    """
    failures = list(_failures(journal, is_open))
    for key, _ in failures:
        await journal.forget(key)
    return Counter(kind for _, kind in failures)


def _failures(journal: Journal, is_open: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """The journal key and the kind of each."""
    for key, value in journal.scan():
        if not is_episode(value) or value["episode"] != key or not is_open(key):
            continue
        if value["failure"] is None:
            yield from _failed_scores(journal, f"{key}/score/")
        elif (failure := Failure(*value["failure"])).origin == "model":
            yield key, failure.kind


def _failed_scores(journal: Journal, prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in journal.scan(prefix):
        if value.get("error") is not None:
            yield key, f"score:{key.removeprefix(prefix)}"
