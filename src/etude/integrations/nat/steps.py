"""The toolkit's intermediate steps of episodes, kept in the journal for evaluators that look at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json, to_json

from etude.store.journal import Journal


class Steps:
    """Steps by episode: those of one that was not scored before a crash are there after it."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    async def keep(self, episode_id: str, steps: Sequence[dict[str, Any]]) -> None:
        """Keep the dumped steps of an episode; what JSON cannot hold becomes text. Raises StoreError."""
        data = from_json(to_json(steps, fallback=str, inf_nan_mode="null"))
        await self._journal.put(_key(episode_id), {"steps": data})

    def of(self, episode_id: str) -> list[dict[str, Any]]:
        """The steps of an episode; none when none were kept."""
        data = self._journal.get(_key(episode_id))
        return [] if data is None else list(data["steps"])


def _key(episode_id: str) -> str:
    return f"{episode_id}/nat"
