"""The scene that is played on, and how the figures of several parts come together."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.chaos.run import ShortRun

Figures = dict[str, Any]
"""Of one part: some of `FIGURES`, `problems` (a sentence for each thing that is not as it has to be), and
whatever else it has measured."""

FIGURES: Mapping[str, tuple[Callable[[list[Any]], Any], float]] = {
    "kills": (sum, float("inf")),
    "faults": (sum, float("inf")),
    "lost": (sum, 0),
    "doubled": (sum, 0),
    "unequal_ends": (sum, 0),
    "silent": (sum, 0),
}
"""By name: what becomes of those of several parts, and the most that one may be."""


@dataclass
class Scene:
    """Where a part plays, and how much of it."""

    folder: Path
    seed: int
    quick: bool
    note: Callable[[str], None]

    def choice(self, part: str) -> random.Random:
        """The dice of a part, the same whichever other parts are played."""
        return random.Random(f"{part} {self.seed}")

    @cached_property
    def short_run(self) -> ShortRun:
        """The run that several parts harm."""
        return ShortRun(self.folder / "short")


def summed(parts: Mapping[str, Figures]) -> Figures:
    """Each of `FIGURES` over all parts that have it, None where none has, and all problems."""
    totals: Figures = {}
    for name, (total, _) in FIGURES.items():
        values = [figures[name] for figures in parts.values() if figures.get(name) is not None]
        totals[name] = total(values) if values else None
    totals["problems"] = sum(len(figures.get("problems", ())) for figures in parts.values())
    return totals


def is_whole(totals: Figures) -> bool:
    """Whether everything is as it has to be."""
    return not totals["problems"] and all((totals[name] or 0) <= most for name, (_, most) in FIGURES.items())
