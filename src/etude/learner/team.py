"""The processes that train one policy together, each on its part of every optimiser step.

They hold the same weights, or each a shard of them, and take the same steps. Each process's gradients and
metrics of a step are summed over all processes before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch

from etude.core.errors import EtudeError, first_line
from etude.models.architecture import logits_after, without_lora
from etude.models.policy import Policy
from etude.models.weights import gather_tensor

T = TypeVar("T")


class PeerLost(EtudeError):
    """Another process of the team ended, or does not answer. The state in memory has become useless."""


class Team:
    """A team of this process alone, and the interface of all teams."""

    rank = 0
    size = 1
    shards = False
    """Whether each process holds only a part of the weights."""
    device: torch.device | None = None
    """Where this process computes, if the team decides that."""

    @property
    def leads(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sum over all processes, which may have different keys. All must call it together."""
        return dict(values)

    def any(self, flag: bool) -> bool:
        """Return whether `flag` is set in any process. All must call it together."""
        return self.sum({"flag": float(flag)})["flag"] > 0

    def hold(self, policy: Policy) -> Callable[[Callable[[Any], T]], T]:
        """Take over a policy's weights; return a function that runs work on the policy's model."""
        return lambda work: work(policy.model)

    def in_step(self, passes: Iterable[T]) -> Iterable[T | None]:
        """Return a step's passes, padded with None (idle passes) if all processes need equally many."""
        return passes

    def halts(self, flag: bool) -> bool:
        """Return whether to stop before the next pass; some teams stop all processes together."""
        return flag

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return whole tensors on the leader, and none elsewhere. All must call it together."""
        return tensors if self.leads else {}

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradient to the parameters' gradients."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace every parameter's gradient by the sum over all processes. All must call it together."""


class ProcessTeam(Team):
    """Several processes that a launcher started."""

    device: torch.device

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the sums in the order of the ranks, so that all processes get the same."""
        totals: dict[str, float] = {}
        for own in self._exchange(dict(values)):
            for name, value in own.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum all at once; a parameter that has no gradient in any process still has none."""
        counts = torch.tensor([float(weight.grad is not None) for weight in parameters], device=self.device)
        _run_collective(lambda: torch.distributed.all_reduce(counts))
        live = [weight for weight, count in zip(parameters, counts.tolist(), strict=True) if count]
        for weight in live:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.contiguous()
        reduce = partial(torch.distributed.all_reduce, async_op=True)
        _run_collective(lambda: [sum_.wait() for sum_ in [reduce(weight.grad) for weight in live]])

    def _exchange(self, value: T) -> list[T]:
        """Return the values of all processes, by rank."""
        from accelerate.utils import gather_object

        return _run_collective(lambda: gather_object([value]))


class ShardingTeam(ProcessTeam):
    """Processes that hold shards of the weights, and so make their passes through the model together.

    Each holds a part of every tensor and of its optimiser state. PyTorch's FSDP2 (`fully_shard`) is called
    directly: accelerate's plugin (1.15) knows only GPUs, and needs a model's own `forward`.
    """

    shards = True

    def hold(self, policy: Policy) -> Callable[[Callable[[Any], T]], T]:
        """Turn the policy's parameters into shards, and move them to this process's device."""
        root: list[_Root] = []
        policy.share_out(lambda model: root.append(_shard(model, self)), self.device)

        def run(work: Callable[[Any], T]) -> T:
            result: T = _run_collective(lambda: root[0](work), may_fail=True)
            if not torch.is_grad_enabled():
                # Otherwise the next pass would see these weights, even after others have been loaded.
                root[0].reshard()  # type: ignore[operator]
            return result

        return run

    def in_step(self, passes: Iterable[T]) -> Iterable[T | None]:
        """Return as many passes as the process with the most of them has."""
        mine = list(passes)
        return [*mine, *[None] * (max(self._exchange(len(mine))) - len(mine))]

    def halts(self, flag: bool) -> bool:
        """Return whether any process wants to stop, because a pass needs all of them."""
        return self.any(flag)

    def backward(self, loss: torch.Tensor) -> None:
        _run_collective(loss.backward, may_fail=True)

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Do nothing: the backward pass has summed them."""

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Gather tensors from all shards, one at a time."""
        gathered: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            full = _run_collective(partial(gather_tensor, tensor), may_fail=True)
            if self.leads:
                gathered[name] = full.detach().cpu()
        return gathered


@contextmanager
def join_team(device: str, timeout: float, *, shards: bool = False) -> Iterator[Team]:
    """Join the processes that a launcher started, and yield their team.

    `device` is `cpu`, or `auto` or `cuda` for one GPU each. A process counts as lost once others have waited
    longer than `timeout` seconds for it. With `shards`, each will hold a part of the weights. Raises PeerLost
    if not all of them join.
    """
    from accelerate import PartialState

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = _run_collective(lambda: PartialState(cpu=on_cpu, timeout=timedelta(seconds=timeout)))
    if state.num_processes == 1:  # The cluster may have only this one left.
        team = Team()
        team.device = state.device
        yield team
        return
    kind = ShardingTeam if shards else ProcessTeam
    yield kind(state.process_index, state.num_processes, state.device)
    # Not after an error: others may wait for this process, and notice its failure by its end.
    state.destroy_process_group()


def idle(model: Any) -> torch.Tensor:
    """Return zero, after a pass through the model that joins in all its sums."""
    zero = torch.zeros(1, dtype=torch.long, device=next(model.parameters()).device)
    return logits_after(model, zero[None], zero).sum() * 0.0


def _run_collective(work: Callable[[], T], *, may_fail: bool = False) -> T:
    """Run work that needs all processes. Raises PeerLost if it fails, with `may_fail` only for lost peers."""
    try:
        return work()
    except RuntimeError as error:
        if may_fail and not (isinstance(error, torch.distributed.DistError) or "gloo" in str(error)):
            raise
        raise PeerLost(
            f"another process of this training has ended, or does not answer: {first_line(error)}"
        ) from error


class _Root(torch.nn.Module):
    """Wraps a model for FSDP, so that work can use more than its `forward`."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[Any], Any]) -> Any:
        # FSDP adds hooks to the results, which must not be views.
        result = work(self.model)
        if isinstance(result, tuple):
            return tuple(value.clone() for value in result)
        return result.clone() if isinstance(result, torch.Tensor) else result


def _shard(model: Any, team: ProcessTeam) -> _Root:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(team.device.type, (team.size,))
    # For any dtype of the weights, sums over many processes need more than eight bits.
    precision = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    plain = without_lora(model)
    layers = set(getattr(plain, "_no_split_modules", None) or ())
    for module in list(plain.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=precision)
    root = _Root(model)
    fully_shard(root, mesh=mesh, mp_policy=precision)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Sum over the processes, without averaging: weights are normalised over the whole step.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root
