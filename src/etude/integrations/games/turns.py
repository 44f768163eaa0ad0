"""A game in turns between an environment and models: each turn is one `episode.chat`."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from etude.core.message import Message
from etude.rollout.episode import Episode


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
