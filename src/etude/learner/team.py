"""The processes that train one policy together, each on its part of every optimiser step.

They hold the same weights and take the same steps: what each adds to a step's gradient and metrics is
summed over all of them before anything changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch

from etude.core.errors import EtudeError
from etude.models.policy import Policy

T = TypeVar("T")

_BUCKET = 1 << 24
"""Numbers that are summed at a time."""


class PeerLost(EtudeError):
    """Another process of the team ended, or does not answer. What is in memory is of no use any more."""


class Team:
    """This process alone: what several do together is what it does."""

    rank = 0
    size = 1
    shards = False
    """Whether each process holds a part of the weights, and not all of them."""
    device: torch.device | None = None
    """Where this process computes, if that is not for others to say."""

    @property
    def leads(self) -> bool:
        """Whether this is the process that writes, and tells."""
        return self.rank == 0

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sum over all processes, which may have different keys. All must call it together."""
        return dict(values)

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process. All must call it together."""
        return self.sum({"flag": float(flag)})["flag"] > 0

    def same(self, text: str) -> bool:
        """Whether all processes say the same. All must call it together."""
        return True

    def hold(self, policy: Policy) -> Callable[[Callable[[Any], T]], T]:
        """Take a policy's weights into the team's keeping; gives what runs work on its model."""
        return lambda work: work(policy.model)

    def in_step(self, passes: Iterable[T]) -> Iterable[T | None]:
        """A step's passes through the model, as many in every process where that matters; None is idle."""
        return passes

    def halts(self, flag: bool) -> bool:
        """Whether to stop before the next pass, as this process or another one would."""
        return flag

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Tensors that processes hold parts of, on the leader; others get none. All must call it together."""
        return tensors if self.leads else {}

    def backward(self, loss: torch.Tensor) -> None:
        """Add a loss's gradient to the parameters'."""
        loss.backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Make every parameter's gradient the sum over all processes. All must call it together."""


class ProcessTeam(Team):
    """Several processes, which `accelerate launch` started."""

    device: torch.device

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device

    def sum(self, values: Mapping[str, float]) -> dict[str, float]:
        """See `Team.sum`. The order is that of the ranks, so that all get the same."""
        totals: dict[str, float] = {}
        for text in self._exchange(json.dumps(values)):
            for name, value in json.loads(text).items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def same(self, text: str) -> bool:
        """See `Team.same`."""
        return len(set(self._exchange(json.dumps(text)))) == 1

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """See `Team.sum_gradients`. A parameter that has no gradient in any process still has none."""
        there = torch.tensor([float(one.grad is not None) for one in parameters], device=self.device)
        self._sum(there)
        live = [one for one, count in zip(parameters, there.tolist(), strict=True) if count]
        for bucket in _buckets(live):
            grads = [torch.zeros_like(one) if one.grad is None else one.grad for one in bucket]
            flat = torch.cat([grad.flatten() for grad in grads])
            self._sum(flat)
            parts = torch.split(flat, [one.numel() for one in bucket])
            for one, part in zip(bucket, parts, strict=True):
                one.grad = part.view_as(one)

    def _exchange(self, text: str) -> list[str]:
        """What each process says, by rank."""
        from accelerate.utils import gather, pad_across_processes

        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self.device)
        rows = _surely(lambda: gather(pad_across_processes(mine))).view(self.size, -1).cpu()
        return [bytes(row.tolist()).rstrip(b"\0").decode() for row in rows]

    def _sum(self, tensor: torch.Tensor) -> None:
        _surely(lambda: torch.distributed.all_reduce(tensor))


@contextmanager
def joined(device: str, timeout: float, *, shards: bool = False) -> Iterator[ProcessTeam]:
    """The team of the processes that `accelerate launch` started, this one among them.

    `device` is `cpu`, or `auto` or `cuda` for one GPU each. A process that others have waited for longer
    than `timeout` seconds is lost to them. With `shards` each will hold a part of the weights. Raises
    PeerLost when they do not all come.
    """
    from accelerate import PartialState

    from etude.learner.sharding import ShardingTeam

    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = _surely(lambda: PartialState(cpu=on_cpu, timeout=timedelta(seconds=timeout)))
    kind = ShardingTeam if shards else ProcessTeam
    yield kind(state.process_index, state.num_processes, state.device)
    # Not after an error: the others may wait for this process to go away, and find that out by its end.
    state.destroy_process_group()


def _surely(work: Callable[[], T]) -> T:
    """Do what needs all processes. Raises PeerLost."""
    try:
        return work()
    except RuntimeError as error:
        raise _lost(error) from error


def losing_nobody(work: Callable[[], T]) -> T:
    """Do what needs all processes and may fail for reasons of its own too. Raises PeerLost."""
    try:
        return work()
    except RuntimeError as error:
        if isinstance(error, torch.distributed.DistError) or "gloo" in str(error):
            raise _lost(error) from error
        raise


def _lost(error: RuntimeError) -> PeerLost:
    told = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return PeerLost(f"another process of this training ended, or does not answer: {told}")


def _buckets(parameters: Sequence[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Neighbours of one dtype, about as many numbers each."""
    bucket: list[torch.nn.Parameter] = []
    size = 0
    for one in parameters:
        if bucket and (one.dtype != bucket[0].dtype or size + one.numel() > _BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(one)
        size += one.numel()
    if bucket:
        yield bucket
