"""Cutting an optimiser step into passes through the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch

from etude.learner.head import has_plain_head
from etude.learner.objective import Pass, Unit
from etude.learner.packed import PackedStep
from etude.learner.padding import Shares, numbered, padded_passes, padded_row
from etude.learner.team import Team
from etude.learner.tree_model import why_not_trees

Packing: TypeAlias = Literal["tree", "padded"]
"""`tree` computes tokens that sequences share once, where there are any and the model takes token trees;
`padded` never does. The gradients are the same."""

Run: TypeAlias = Callable[[Callable[[Any], Any]], Any]
"""Calls a function with the model, as `Team.hold` returns it."""


class Cutter:
    """Cuts steps as token trees where sequences begin alike and the model takes them, or else padded."""

    def __init__(
        self, run: Run, team: Team, device: torch.device, packing: Packing, token_budget: int
    ) -> None:
        """At most `token_budget` tokens go through the model at a time."""
        self.note: str | None = None
        """Why tokens that sequences share are computed for each of them, once it is known that they are."""
        self._run = run
        self._team = team
        self._device = device
        self._packing = packing
        self._budget = token_budget
        self._takes_trees: bool | None = None
        self._plain_head: bool | None = None

    def passes(
        self, units: Sequence[Unit], factors: Sequence[Sequence[float]], shares: Shares
    ) -> Iterator[Pass]:
        """This process's part of a step. `factors` and `shares` are those of the whole step."""
        tree = PackedStep(units) if self._packing == "tree" else None
        if tree is not None and not (tree.pays and self.takes_trees()):
            tree = None
        if tree is None and self._plain_head is None:
            with torch.no_grad():
                plain = self._run(has_plain_head)
            # How a pass goes through the model depends on it, so all processes must think the same.
            self._plain_head = not self._team.any(not plain)
        rows = numbered(units, factors)
        if self._team.size > 1:
            row = padded_row(units) if tree is None else tree.row()
            mine = row.part(self._team.rank, self._team.size)
            rows = [rows[index] for index in mine]
            tree = None if tree is None else PackedStep([units[index] for index in mine])
        if tree is None:
            return padded_passes(rows, shares, self._budget, self._device, bool(self._plain_head))
        return tree.passes(rows, shares, self._budget, self._device)

    def takes_trees(self) -> bool:
        """Whether the model takes token trees; it is tried once. All processes must call it together."""
        if self._takes_trees is None:
            with torch.no_grad():
                reason = self._run(why_not_trees)
            # How a step is dealt depends on it, so all processes must think the same.
            self._takes_trees = not self._team.any(reason is not None)
            if not self._takes_trees:
                why = reason or "another process cannot run this model on token trees"
                self.note = f"tokens that sequences share are computed for each of them: {why}"
        return self._takes_trees
