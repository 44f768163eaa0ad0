"""Weights in shards: each process of a team holds a part of every tensor, and of its optimiser state.

PyTorch's FSDP2 (`fully_shard`) brings a layer's weights together while it computes, and shares out the sums
of its gradients. It is called here and not by accelerate's plugin, which knows GPUs only (1.15), and looks
for hooks in a model's own `forward`: token trees go through the model another way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from etude.learner.team import ProcessTeam, losing_nobody
from etude.models.architecture import logits_after
from etude.models.policy import Policy
from etude.models.weights import whole

T = TypeVar("T")


class ShardingTeam(ProcessTeam):
    """Processes that hold shards of the weights, and so go through the model in step."""

    shards = True

    def hold(self, policy: Policy) -> Callable[[Callable[[Any], T]], T]:
        """See `Team.hold`. The policy's parameters become shards, and move to this process's device."""
        root: list[_Whole] = []
        policy.share_out(lambda model: root.append(_sharded(model, self)), self.device)
        return lambda work: losing_nobody(lambda: _run(root[0], work))

    def in_step(self, passes: Iterable[T]) -> Iterable[T | None]:
        """See `Team.in_step`."""
        mine = list(passes)
        most = max(int(text) for text in self._exchange(str(len(mine))))
        return [*mine, *[None] * (most - len(mine))]

    def halts(self, flag: bool) -> bool:
        """See `Team.halts`."""
        return self.any(flag)

    def backward(self, loss: torch.Tensor) -> None:
        """See `Team.backward`. It takes all processes."""
        losing_nobody(loss.backward)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """There is nothing left to do: the backward pass has summed them."""

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Team.whole`."""
        found: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            together = losing_nobody(lambda tensor=tensor: whole(tensor))  # type: ignore[misc]
            if self.leads:
                found[name] = together.detach().cpu()
        return found


def idle(model: Any) -> torch.Tensor:
    """Nothing, after a way through the model that takes part in all its sums."""
    device = next(model.parameters()).device
    ids_BT = torch.zeros(1, 1, dtype=torch.long, device=device)
    return logits_after(model, ids_BT, torch.zeros(1, dtype=torch.long, device=device)).sum() * 0.0


class _Whole(torch.nn.Module):
    """A model, for work of which its `forward` is only a part."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[Any], Any]) -> Any:
        # FSDP hooks into what comes out, which must be nobody's view.
        found = work(self.model)
        if isinstance(found, tuple):
            return tuple(one.clone() for one in found)
        return found.clone() if isinstance(found, torch.Tensor) else found


def _sharded(model: Any, team: ProcessTeam) -> _Whole:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(team.device.type, (team.size,))
    # Whatever the weights are in, sums over many processes want more than eight bits.
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    plain = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = set(getattr(plain, "_no_split_modules", None) or ())
    for module in list(plain.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    root = _Whole(model)
    fully_shard(root, mesh=mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # The sum over the processes, not their mean: weights are normalised over the whole step.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _run(root: _Whole, work: Callable[[Any], T]) -> T:
    found: T = root(work)
    if not torch.is_grad_enabled():
        # Otherwise the next one would see these weights, though others have been loaded.
        root.reshard()  # type: ignore[operator]
    return found
