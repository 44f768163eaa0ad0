"""A learner's numbers of each sample when it first learns from it, kept for people to look at."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.core.sample import Sample
from etude.learner.objective import Pass, Unit
from etude.store.learned import Seen


class Witness:
    """Sees each step of a learner, and keeps the first sight of each sample, which is in the loss."""

    def __init__(self) -> None:
        self.seen: dict[int, Seen] = {}
        """By `id` of a sample, which whoever has the witness keeps alive."""
        self._samples: Sequence[Sample] = ()

    def begin(self, units: Sequence[Unit]) -> None:
        """A step on these units begins; the rows of its passes are counted through their samples."""
        self._samples = [sample for unit in units for sample in unit]

    def saw(self, chunk: Pass, logprobs_BT: torch.Tensor, entropies_BT: torch.Tensor | None) -> None:
        """A pass of the step was computed."""
        # Off the device at once: to wait for it row by row takes longer than the rows do.
        trained_BT, logprobs_BT = (chunk.micro.weights_BT != 0).cpu(), logprobs_BT.detach().cpu()
        entropies_BT = None if entropies_BT is None else entropies_BT.detach().cpu()
        for row, number in enumerate(chunk.rows):
            own_T = trained_BT[row]
            logprobs = logprobs_BT[row][own_T].tolist()
            entropies = () if entropies_BT is None else entropies_BT[row][own_T].tolist()
            self.seen.setdefault(id(self._samples[number]), Seen(logprobs, entropies))
