"""A learner's state at one moment: all that its next step depends on, and its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from etude.core.errors import StoreError
from etude.models.weights import save_tensors
from etude.store.files import WEIGHTS_FILE, note_sum

OPTIMISER_FILE = "optimiser.safetensors"
STATE_FILE = "learner.json"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Whole weights and optimiser state by name, even if processes hold shards; and the step count.

    The next step changes these tensors.
    """

    weights: Mapping[str, torch.Tensor]
    optimiser: Mapping[str, torch.Tensor]
    step: int
    trained: int

    @property
    def size(self) -> int:
        """Total bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.weights.values(), *self.optimiser.values()))

    def copied(self) -> Snapshot:
        """Return a copy on the CPU, which further training does not change."""
        weights, optimiser = (
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for tensors in (self.weights, self.optimiser)
        )
        return replace(self, weights=weights, optimiser=optimiser)

    def save(self, folder: Path) -> str:
        """Write everything into `folder`; return the digest of the weights. Raises StoreError."""
        # Digests and the disk take most of the time, and release the interpreter's lock.
        with ThreadPoolExecutor(1, thread_name_prefix="save") as beside:
            optimiser = beside.submit(save_tensors, self.optimiser, folder / OPTIMISER_FILE)
            digest = save_tensors(self.weights, folder / WEIGHTS_FILE)
        optimiser.result()
        try:
            position = {"step": self.step, "trained": self.trained}
            (folder / STATE_FILE).write_text(json.dumps(position), encoding="utf-8")
            note_sum(folder / STATE_FILE)
        except OSError as error:
            raise StoreError(f"cannot write {folder / STATE_FILE}: {error}") from error
        return digest
