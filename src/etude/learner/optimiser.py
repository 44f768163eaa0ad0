"""The steps of a training: rows, learning rate, AdamW's update of float32 master weights, and checkpoints.

The optimiser saves and restores all of its state. bfloat16 has eight significant bits, so rounding would lose
every step of less than a 500th of a weight (Micikevicius et al., 2018). Each number trained in half precision
takes 18 bytes: weight (2), master (4), gradient (4) and AdamW's moments (8). In float32 it takes 16.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch.nn import Parameter

from etude.core.errors import StoreError
from etude.core.keys import generator
from etude.models.weights import digest, gather_tensor, own_part, save_tensors
from etude.store.files import WEIGHTS_FILE, note_sum


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step of a training."""

    number: int
    """The step's number over all passes, from 1 on."""
    of: int
    """Number of steps of the whole training."""
    epoch: int
    """The pass over the data that the step belongs to, from 1 on."""
    rows: tuple[int, ...]
    """Indices of the rows to learn from."""
    ends_epoch: bool

    @property
    def part(self) -> float:
        """The share of the training before this step, in [0, 1)."""
        return (self.number - 1) / self.of


def plan_steps(
    live: Sequence[bool], passes: int, batch_size: int | None, seed: int, *key: str | int
) -> list[Step]:
    """Plan all steps of a training, shuffled again for each pass; the same arguments give the same plan.

    `live` tells for each row whether it has something to learn from. A step without such a row is left out,
    because the optimiser's momentum would still move weights. `batch_size` None takes all rows at once.
    """
    size = batch_size or max(1, len(live))
    batches: list[tuple[int, tuple[int, ...]]] = []
    for number in range(passes):
        order = list(range(len(live)))
        if size < len(order):
            generator(seed, *key, number).shuffle(order)
        chunks = [tuple(order[at : at + size]) for at in range(0, len(order), size)]
        batches += [(number + 1, rows) for rows in chunks if any(live[row] for row in rows)]
    last = {epoch: index for index, (epoch, _) in enumerate(batches)}
    return [
        Step(index + 1, len(batches), epoch, rows, ends_epoch=last[epoch] == index)
        for index, (epoch, rows) in enumerate(batches)
    ]


Shape = Literal["constant", "linear", "cosine"]
"""How the rate falls: not at all, linearly, or along half a cosine wave (Loshchilov and Hutter, 2017)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The learning rate of every optimiser step, as a share of the highest.

    The rate falls with the share of the run that is done. It counts trainings (a job's data, once through the
    learner), because the number of later steps is unknown until their data are collected.
    """

    shape: Shape = "constant"
    warmup_steps: int = 0
    """Steps over which the rate rises from 0, counted over the whole run."""
    trainings: int = 1
    """Number of trainings in the run; the rate falls over all of them."""
    floor: float = 0.0
    """The share that remains at the end of the run, and after it."""

    def share(self, step: int, trained: int, part: float) -> float:
        """Return a step's share of the highest rate.

        `step` counts from 1 over the whole run, and `trained` counts completed trainings. `part` is the share
        of this training before the step, in [0, 1).
        """
        warm = min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0
        done = min(1.0, (trained + part) / self.trainings)
        if self.shape == "constant":
            return warm
        fall = 1.0 - done if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return warm * (self.floor + (1.0 - self.floor) * fall)


_HALF = torch.bfloat16, torch.float16
_FUSED = "cpu", "cuda"
"""Devices on which AdamW's step is one kernel."""
_MASTER = "master"
"""Key of a master weight, next to the names of AdamW's own tensors."""


class Optimiser:
    """AdamW on the master weights of trained parameters; a float32 parameter is its own master.

    If parameters are shards, so are their masters.
    """

    def __init__(
        self, parameters: Mapping[str, Parameter], *, betas: tuple[float, float], weight_decay: float
    ) -> None:
        self.masters = {
            name: Parameter(parameter.detach().float()) if parameter.dtype in _HALF else parameter
            for name, parameter in parameters.items()
        }
        """Master weights by parameter name."""
        self._pairs: dict[str, tuple[Any, Parameter]] = {
            name: (parameter, self.masters[name])
            for name, parameter in parameters.items()
            if self.masters[name] is not parameter
        }
        self._seen: list[int] = []
        """How often each of these parameters had been changed when it was like its master."""
        # One pass through memory instead of fifteen, without room for copies of changed values.
        fused = all(master.device.type in _FUSED for master in self.gradients)
        self.adam = torch.optim.AdamW(
            self.gradients, betas=betas, weight_decay=weight_decay, fused=fused or None
        )

    @property
    def gradients(self) -> list[Parameter]:
        """The masters, which accumulate a step's gradient."""
        return list(self.masters.values())

    @property
    def bytes_to_come(self) -> int:
        """Bytes of this process's gradients, and of AdamW's moments before the first step."""
        numbers = sum(_local(master).numel() for master in self.gradients)
        return numbers * (4 if self.adam.state else 12)

    def drop_gradient(self) -> None:
        """Discard the gradient that backward passes have added up."""
        self.adam.zero_grad(set_to_none=True)

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Within the block, add the gradients of backward passes up in float32, on the masters."""
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(_hand_over, master))
            for parameter, master in self._pairs.values()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def clip(self, most: float) -> float:
        """Scale the gradient down to a norm of at most `most`; return the norm that it had."""
        return float(gather_tensor(torch.nn.utils.clip_grad_norm_(self.gradients, most)))

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the masters by their gradient, and round them to the parameters."""
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        self.adam.step()
        for parameter, master in self._pairs.values():
            parameter.copy_(master)
        self._seen = self._changes()

    def _changes(self) -> list[int]:
        """Return how often each parameter that has a master was changed in place."""
        return [_local(parameter)._version for parameter, _ in self._pairs.values()]

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Copy the parameters to the masters, if something else changed the parameters."""
        changes = self._changes()
        if self._seen == changes:
            return
        self._seen = changes
        pairs = [(_local(parameter), _local(master)) for parameter, master in self._pairs.values()]
        same = [(parameter == master.to(parameter.dtype)).all() for parameter, master in pairs]
        # Wait for the device once, not for each tensor.
        if pairs and not torch.stack(same).all():
            for parameter, master in self._pairs.values():
                master.copy_(parameter)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return AdamW's state, and the masters that are not parameters, in the form for `restore`."""
        moments = {
            f"{name}/{key}": value
            for name, master in self.masters.items()
            for key, value in self.adam.state.get(master, {}).items()
        }
        return moments | {f"{name}/{_MASTER}": master.detach() for name, (_, master) in self._pairs.items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Resume from the result of `tensors`; an empty one means before the first step.

        Saved masters are used if they match the weights; otherwise the masters copy the weights. So the
        checkpoint of a float32 training, which has no masters, works too. Raises StoreError for others.
        """
        state: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, value in tensors.items():
            name, _, part = key.rpartition("/")
            state[name][part] = value
        odd = sorted(state.keys() - self.masters.keys())
        if odd:
            raise StoreError(
                f"the saved state of the optimiser belongs to other weights ({odd[0]}); was the model or the "
                "LoRA setting changed?"
            )
        masters = {name: parts.pop(_MASTER) for name, parts in state.items() if _MASTER in parts}
        with torch.no_grad():
            for name, (parameter, master) in self._pairs.items():
                master.copy_(own_part(masters[name], master) if name in masters else parameter)
        self._seen = []
        self.sync_masters()
        self.adam.state.clear()
        for name, parts in state.items():
            master = self.masters[name]
            # The single kernel counts steps on the weights' device, other kernels on the CPU.
            counting = master.device if self.adam.defaults["fused"] else "cpu"
            self.adam.state[master] = {
                part: value.to(counting) if part == "step" else own_part(value.to(master.dtype), master)
                for part, value in parts.items()
            }


def _hand_over(master: Parameter, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    if master.grad is None:
        master.grad = parameter.grad.float()
    else:
        master.grad += parameter.grad
    parameter.grad = None


def _local(tensor: Any) -> torch.Tensor:
    """Return the part that this process holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[no-any-return]


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

    def to_cpu(self) -> Snapshot:
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
            save_tensors(self.weights, folder / WEIGHTS_FILE)
        optimiser.result()
        try:
            position = {"step": self.step, "trained": self.trained}
            (folder / STATE_FILE).write_text(json.dumps(position), encoding="utf-8")
            note_sum(folder / STATE_FILE)
        except OSError as error:
            raise StoreError(f"cannot write {folder / STATE_FILE}: {error}") from error
        return digest(self.weights)
