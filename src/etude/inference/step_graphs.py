"""Steps of single tokens as graphs: a device starts the hundreds of small kernels of one all at once.

A graph reads its inputs from memory that stays, for one number of rows and one span. So rows are filled up
to one of a few numbers, spans to one of a few lengths, and each shape is recorded when it is first asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeAlias

import torch

from etude.inference.kv_slots import KvSlots
from etude.models.architecture import off_by

_LOG = logging.getLogger("etude.engine")

_KEPT = 64
"""Graphs at most."""
_SPAN = 256
"""Columns by which spans grow at least."""

Forward: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
"""From numbers [3, B, 1], which are ids, positions and columns, and a span to logits [B, V]."""
Replay: TypeAlias = Callable[[], torch.Tensor]
Record: TypeAlias = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Replay]]
"""Runs a function; gives its result, and what does the same with what is in memory then. Raises RuntimeError
for what cannot be recorded."""


class StepGraphs:
    """The forward passes of the rows in the first slots, recorded by shape."""

    def __init__(
        self, forward: Forward, record: Record, kv: KvSlots, weights: Iterable[torch.Tensor]
    ) -> None:
        """`forward` reads and writes `kv`, and reads `weights`."""
        self._forward, self._record, self._kv = forward, record, kv
        self._graphs: dict[tuple[int, int], tuple[torch.Tensor, Replay]] = {}
        """By rows and span: memory for the numbers, and the graph. Those used the longest ago are first."""
        self._slots = kv.slots, kv.columns
        self._weights = _places(weights)
        self._refused = False

    def shape(self, rows: int, length: int) -> tuple[int, int]:
        """Rows and span for so many rows, of which the longest has `length` tokens.

        Rows grow by a quarter of a power of two, as padding is free where a step takes as long as to read the
        weights; spans by an eighth.
        """
        span = _filled(length, max(_SPAN, _quarter(length) // 2))
        return min(_filled(rows, _quarter(rows)), self._kv.slots), span

    def __call__(self, numbers_3B1: torch.Tensor, span: int) -> torch.Tensor:
        """Logits [B, V], in memory that later calls write to."""
        if self._refused:
            return self._forward(numbers_3B1, span)
        if self._slots != (self._kv.slots, self._kv.columns):
            self._slots = self._kv.slots, self._kv.columns
            self._graphs.clear()
        key = numbers_3B1.shape[1], span
        graph = self._graphs.pop(key, None)
        if graph is None:
            return self._first(key, numbers_3B1)
        self._graphs[key] = graph
        own_3B1, replay = graph
        own_3B1.copy_(numbers_3B1)
        return replay()

    def renew(self, weights: Iterable[torch.Tensor]) -> None:
        """The weights have changed. Where they are still in the same memory, all graphs are right."""
        if (places := _places(weights)) != self._weights:
            self._weights = places
            self._graphs.clear()

    def _first(self, key: tuple[int, int], numbers_3B1: torch.Tensor) -> torch.Tensor:
        """Record a shape. Its replay is held to the plain step; where they differ, steps stay plain."""
        while len(self._graphs) >= _KEPT:
            del self._graphs[next(iter(self._graphs))]
        own_3B1, span = numbers_3B1.clone(), key[1]
        try:
            plain_BV, replay = self._record(lambda: self._forward(own_3B1, span))
            off = off_by(replay(), plain_BV, plain_BV.dtype)
            if off is not None:
                raise RuntimeError(f"a replay's logits are off by {off} of the largest")
        except RuntimeError as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            _LOG.warning("tokens are sampled without CUDA graphs, more slowly: %s", reason)
            self._refused = True
            self._graphs.clear()
            return self._forward(numbers_3B1, span)
        self._graphs[key] = own_3B1, replay
        return plain_BV


def cuda_graphs(device: torch.device) -> Record:
    """Records graphs that share memory: the result of one is there until another is replayed."""
    with torch.cuda.device(device):
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def captured(function: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on asking the device for memory.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            return graph, function()
        finally:
            graph.capture_end()

    with torch.cuda.stream(stream):
        # Shared memory is gone with the last graph in it, and cannot be asked for again.
        anchor = captured(lambda: torch.zeros(1, device=device))

    def record(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        usual = torch.cuda.current_stream(device)
        stream.wait_stream(usual)
        with torch.cuda.stream(stream):
            plain = function()  # What is made once, such as room for matrix products, is made here.
            graph, result = captured(function)
        usual.wait_stream(stream)

        def replay(beside: object = anchor) -> torch.Tensor:
            graph.replay()
            return result

        return plain, replay

    return record


def _places(weights: Iterable[torch.Tensor]) -> list[int]:
    return [weight.data_ptr() for weight in weights]


def _filled(count: int, step: int) -> int:
    return -(-count // step) * step


def _quarter(count: int) -> int:
    """Of the power of two that is next, or 1."""
    return max(1, (1 << (count - 1).bit_length()) // 4)
