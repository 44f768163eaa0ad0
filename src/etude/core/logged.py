"""Examples whose episodes were played before the run: chats that somebody has logged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from etude.core.episode import EpisodeRecord
from etude.core.example import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedExample(Example):
    """An example with its episodes: where others are played, these are read."""

    episodes: int
    """How many there are. A collection has all of them, whatever number it asks for."""
    read: Callable[[int], EpisodeRecord]
    """The episode of a number, from 0. Raises StoreError."""
    origin: str
    """Where they come from, for messages: `runs/chats`."""

    def played(self, episode_id: str, generation: int, model: str) -> EpisodeRecord:
        """An episode as one of the run's own, whose calls count as answered by `model` of `llms`."""
        record = self.read(generation)
        calls = tuple(
            replace(call, model=model, logged=True, request=replace(call.request, conversation=episode_id))
            for call in record.calls
        )
        example = Example(self.id, self.inputs, self.expected)
        return replace(record, id=episode_id, example=example, generation=generation, calls=calls)
