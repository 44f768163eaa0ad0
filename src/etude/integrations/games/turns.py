"""A game in turns between an environment and models: each turn is one `episode.chat`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from etude.core.data_model import kind_of
from etude.core.errors import EpisodeError
from etude.core.example import Example
from etude.core.message import Message
from etude.rollout.episode import Episode


def whole_number(example: Example, name: str, what: str) -> int:
    """An input of an example that a game cannot do without. Raises EpisodeError where it is none.

    Text counts as the number that it spells: all that a CSV file holds is text.
    """
    value = example.inputs.get(name)
    try:
        return int(str(value))
    except ValueError:
        found = "it has none" if value is None else f"found {kind_of(value)}"
        raise EpisodeError(
            f"example {example.id!r} is no game: {what} needs a whole number as '{name}', and {found}; give "
            "each row one, or leave the dataset out, and the workflow brings its own"
        ) from None


def beginning_of(example: Example, what: str) -> tuple[int | None, Mapping[str, Any] | None]:
    """The `seed` and the `options` that a game is reset with; a row has either or both.

    Raises EpisodeError for an example that has neither: each of its episodes would be another game.
    """
    options = example.inputs.get("options")
    if options is not None and not isinstance(options, Mapping):
        raise EpisodeError(f"example {example.id!r}: 'options' is a mapping, found {kind_of(options)}")
    needs_seed = options is None or example.inputs.get("seed") is not None
    return (whole_number(example, "seed", what) if needs_seed else None), options


@dataclass
class Player:
    """One seat at a game: what it was shown, what it said, and the model that speaks for it."""

    name: str
    model: str | None = None
    prompt: str | None = None
    history: bool = True
    messages: list[Message] = field(default_factory=list)

    async def answer(self, episode: Episode, observation: str) -> str:
        """The model's answer to an observation. Its calls are those of the function with the seat's name."""
        if not self.history:
            self.messages.clear()
        if not self.messages and self.prompt:
            observation = f"{self.prompt}\n\n{observation}"
        self.messages.append({"role": "user", "content": observation})
        with episode.function(self.name):
            reply = await episode.chat(self.messages, model=self.model)
        self.messages.append(reply.message)
        return reply.text


@dataclass
class Course:
    """How a game went: turns, invalid answers, and what each seat has earned so far."""

    turns: int = 0
    invalid: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, float] = field(default_factory=dict)

    def earn(self, seat: str, reward: float) -> None:
        """Add to what a seat has earned."""
        self.rewards[seat] = self.rewards.get(seat, 0.0) + reward

    def record(self, episode: Episode, penalty: float = 0.0) -> dict[str, Any]:
        """Record the scores of the episode, and of each seat where there are several; the episode's output.

        `penalty` is taken from the reward for each invalid answer.
        """
        episode.score("turns", self.turns)
        episode.score("invalid", self.invalid.total())
        rewards = {seat: reward - penalty * self.invalid[seat] for seat, reward in self.rewards.items()}
        for seat, reward in rewards.items():
            episode.score("reward", reward, agent=seat if len(rewards) > 1 else None)
        return {"rewards": rewards, "turns": self.turns, "invalid": dict(self.invalid)}
