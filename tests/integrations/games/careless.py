"""Environments as a hurried user writes them: each does one thing wrong."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import numpy
from gymnasium.spaces import Box, Discrete


class Counting:
    """A game that is won by saying the target's word. It needs no base class."""

    action_space = Discrete(3)
    closed: ClassVar[list[str]] = []

    def __init__(self, fault: str = "", steps: int = 2) -> None:
        self.fault, self.steps = fault, steps

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        if self.fault == "reset":
            return "say 1"
        self.target = random.Random(seed).randrange(3)
        return self._observation(), {}

    def _observation(self) -> Any:
        return numpy.zeros((64, 64, 3)) if self.fault == "picture" else f"say {self.target}"

    def step(self, action: int) -> Any:
        self.steps -= 1
        if self.fault == "raises":
            raise KeyError("no such square")
        if self.fault == "four":
            return "next", 0.0, True, {}
        reward = float("nan") if self.fault == "nan" else numpy.float32(action == self.target)
        return self._observation(), reward, numpy.bool_(self.steps <= 0), False, {}

    def close(self) -> None:
        Counting.closed.append(self.fault)


class Pictures(Counting):
    """Its actions are no words."""

    action_space = Box(0.0, 1.0, (2,))


def two_times(text: str) -> int:
    """An action that is written twice."""
    first, second = text.split()
    if first != second:
        raise ValueError("write the number twice")
    return int(first)


def shout(observation: str, env: Counting) -> str:
    return observation.upper()
