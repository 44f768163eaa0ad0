"""Decoding with key-value slots, which keep the tokens that a conversation has read."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeAlias

import torch

from etude.core.errors import first_line
from etude.engines.fused_llama import FusedLlama
from etude.engines.fused_weights import can_fuse
from etude.engines.kv_slots import COLUMN_STEP, KvSlots, SlotTable, StepPlan, rounded_up
from etude.engines.sampler import LiveRow, append_samples
from etude.engines.step_inputs import InputMaker, tensor
from etude.models.architecture import layer_kinds, logit_error
from etude.models.policy import Policy

CHUNK = 256
"""Maximum number of one row's tokens in a step. It is fixed, so that a prompt is always cut the same way."""
STEP_TOKENS = 8192
"""Maximum number of tokens of all rows in a step."""
PATIENCE = 8
"""Steps that a prompt waits for other prompts before it is read alone."""
_FIXED_ROWS = 32
"""Number of rows in a deterministic step that adds single tokens."""
_FIXED_TOKENS = 512
"""Number of tokens in a deterministic step that reads prompts, padding included."""

_COPIED = 1 << 26
"""Maximum number of parameters of a shared base that each of its policies copies to be faster."""


class SlotDecoder:
    """Continuous batching in padded passes: each pass reads prompts, or adds single tokens.

    With `deterministic`, a row's numbers do not depend on other rows. Matrix products of different shapes
    differ in the last bits, so the shape of every forward pass then follows from the row alone. Rows of like
    shape share a pass, which is padded to a fixed number of rows. Nothing is kept for a conversation's next
    turn, because a token read in a prompt differs from the same token read alone.
    """

    def __init__(
        self, policy: Policy, *, slots: int, deterministic: bool, record: Record | None = None
    ) -> None:
        """`slots` conversations keep their keys and values between two turns. `record` records steps of
        single tokens for replay; their shapes then depend on the other rows."""
        self._policy = policy
        self._deterministic = deterministic
        self._kinds = layer_kinds(policy.model)
        self._table = SlotTable(slots, least=_FIXED_ROWS if deterministic else 1)
        self._kv = KvSlots(len(self._kinds), len(self._table))
        self._inputs = InputMaker(policy)
        self._postponed = 0
        self._fused = self._make_fused_model()
        weights = policy.model.parameters()
        self._graphs = None if record is None else StepGraphs(self._leading_logits, record, self._kv, weights)

    @torch.inference_mode()
    def step(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Read prompts or add single tokens; append a token to each row that has been read completely.

        Returns the rows that gained a token. Raises EngineError if the logits are not finite.
        """
        self._take_in(rows)
        grown: list[LiveRow] = []
        for batch in self._batches(rows):
            logits_BV = self._forward(batch)
            if read := [row for row in batch if row.pending == 0]:
                append_samples(read, logits_BV)
                grown += read
        return grown

    def release(self, row: LiveRow) -> None:
        """Release a finished row. Its slot keeps the tokens read until another conversation needs it."""
        self._table.release(row)

    def forget(self) -> None:
        """Drop all slots' contents when the weights change. Rows in flight are read again from the start."""
        self._table.forget()
        del self._fused  # First, or both copies would be in memory at once.
        self._fused = self._make_fused_model()
        if self._graphs is not None:
            self._graphs.renew(self._policy.model.parameters())

    def _make_fused_model(self) -> FusedLlama | None:
        return FusedLlama(self._policy.model) if fuses(self._policy) else None

    def _take_in(self, rows: Sequence[LiveRow]) -> None:
        """Give slots to new rows, and copy the tokens that they need not read."""
        if new := [row for row in rows if row.slot < 0]:
            for row in new:
                self._table.place(row, reuse=not self._deterministic)
            self._kv.reserve(self._table.lengths(), 0)
        self._kv.copy(self._table.copies())

    def _batches(self, rows: Sequence[LiveRow]) -> Iterator[list[LiveRow]]:
        """Yield the rows of each forward pass in this step.

        Prompts wait briefly for others, because reading one costs as much as reading many.
        """
        reading = [row for row in rows if row.pending > 1 and not self._table.waits(row)]
        generating = [row for row in rows if row.pending == 1] if len(reading) < len(rows) else []
        if reading and (len(reading) * 4 >= len(generating) or self._postponed >= PATIENCE):
            self._postponed, chosen, width = 0, list[LiveRow](), 0
            for row in reading:  # As many as a step may read, in order of arrival.
                width = max(width, min(row.pending, CHUNK))
                if chosen and width * (len(chosen) + 1) > STEP_TOKENS:
                    break
                chosen.append(row)
        else:
            self._postponed += 1
            chosen = generating
        if not chosen:
            return  # The rows that others wait for were cancelled a moment ago.
        if not self._deterministic:
            yield self._gather_slots(chosen) if chosen is generating else chosen
            return
        alike = defaultdict(list)
        for row in chosen:
            alike[_fixed_shape(row)].append(row)
        for (width, _), group in sorted(alike.items()):
            size = _fixed_rows(width)
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _gather_slots(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Move the rows' slots to the front, where attention reads them in place; return sorted rows."""
        count = len(rows)
        outside = [row.slot for row in rows if row.slot >= count]
        if outside:
            inside = {row.slot for row in rows}
            free = (slot for slot in range(count) if slot not in inside)
            pairs = zip(outside, free, strict=False)
            self._kv.copy([copy for pair in pairs for copy in self._table.swap(*pair)])
        return sorted(rows, key=lambda row: row.slot)

    def _forward(self, rows: list[LiveRow]) -> torch.Tensor:
        """Return the logits [., V] of rows that are then read completely; mark the tokens read as cached."""
        counts = [min(row.pending, CHUNK) for row in rows]
        if self._graphs is not None and max(counts) == 1:
            return self._replay_step(rows, self._graphs)
        if self._deterministic:
            width, span = _fixed_shape(rows[0])
            fill = _fixed_rows(width) - len(rows)
        else:
            width, fill = max(counts), 0
            span = rounded_up(max(row.cached + count for row, count in zip(rows, counts, strict=True)))
        self._kv.reserve(self._table.lengths(), span)
        slots = [row.slot for row in rows]
        if fill:
            taken = set(slots)
            # Padding rows write to the waste bin of other rows' slots, and harm nothing there.
            slots += islice((slot for slot in range(len(self._table)) if slot not in taken), fill)
        # Deterministic mode always copies slots, so that memory looks the same wherever they are.
        leading = not self._deterministic and slots == list(range(len(slots)))
        numbers_3BT = self._inputs.numbers(rows, (len(slots), width), self._kv)
        slot_B = tensor(slots, self._policy.device)
        plan = self._inputs.plan(numbers_3BT, slot_B, span, self._kv, leading=leading)
        for row, count in zip(rows, counts, strict=True):
            row.cached += count
        read = tensor([index for index, row in enumerate(rows) if row.pending == 0], self._policy.device)
        logits_BV = self._logits(plan)
        return logits_BV if len(read) == len(slots) else logits_BV[read]

    def _replay_step(self, rows: list[LiveRow], graphs: StepGraphs) -> torch.Tensor:
        """Return the logits [B, V] after single tokens of rows in the first slots, from a recorded step."""
        longest = max(row.cached for row in rows) + 1
        self._kv.reserve(self._table.lengths(), graphs.shape(len(rows), longest)[1])
        count, span = graphs.shape(len(rows), longest)
        # Padding rows write to the waste bin of other rows' slots, and harm nothing there.
        logits_BV = graphs(self._inputs.numbers(rows, (count, 1), self._kv), span)
        for row in rows:
            row.cached += 1
        return logits_BV[: len(rows)]

    def _leading_logits(self, numbers_3B1: torch.Tensor, span: int) -> torch.Tensor:
        """Return the logits [B, V] after single tokens in the first slots."""
        slot_B = torch.arange(numbers_3B1.shape[1], device=numbers_3B1.device)
        return self._logits(self._inputs.plan(numbers_3B1, slot_B, span, self._kv, leading=True))

    def _logits(self, plan: StepPlan) -> torch.Tensor:
        """Return the logits [B, V] after each row's last token."""
        if self._fused is not None:
            count, width = plan.ids_BT.shape
            last = torch.arange(width - 1, count * width, width)
            return self._fused(self._inputs.pad_left(plan), self._kv, last)
        masks = plan.masks
        output = self._policy.model(
            input_ids=plan.ids_BT,
            position_ids=plan.position_BT,
            attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
            past_key_values=self._kv,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV


def fuses(policy: Policy) -> bool:
    """Return whether to make a faster copy of the model; large ones that policies share get none."""
    parameters = sum(value.numel() for value in policy.model.parameters()) if policy.shares_base else 0
    return parameters <= _COPIED and can_fuse(policy.model)


def _fixed_shape(row: LiveRow) -> tuple[int, int]:
    """Return the width and span of the pass that reads the row next, whatever other rows there are."""
    count = min(row.pending, CHUNK)
    width = 1 if count == 1 else max(16, 1 << (count - 1).bit_length())
    return width, rounded_up(1 << (row.cached + count - 1).bit_length(), COLUMN_STEP)


def _fixed_rows(width: int) -> int:
    return _FIXED_ROWS if width == 1 else _FIXED_TOKENS // width


_LOG = logging.getLogger("etude.engine")

_KEPT = 64
"""Maximum number of graphs."""
_SPAN = 256
"""Minimum number of columns by which spans grow."""

Forward: TypeAlias = Callable[[torch.Tensor, int], torch.Tensor]
"""Maps numbers [3, B, 1] (ids, positions and columns) and a span to logits [B, V]."""
Replay: TypeAlias = Callable[[], torch.Tensor]
Record: TypeAlias = Callable[[Callable[[], torch.Tensor]], tuple[torch.Tensor, Replay]]
"""Runs a function; returns its result, and a function that repeats it on the current contents of memory.
Raises RuntimeError if the function cannot be recorded."""


class StepGraphs:
    """Recorded forward passes of the rows in the first slots, by shape."""

    def __init__(
        self, forward: Forward, record: Record, kv: KvSlots, weights: Iterable[torch.Tensor]
    ) -> None:
        """`forward` reads and writes `kv`, and reads `weights`."""
        self._forward, self._record, self._kv = forward, record, kv
        self._graphs: dict[tuple[int, int], tuple[torch.Tensor, Replay]] = {}
        """The memory of the numbers and the graph, by rows and span; least recently used first."""
        self._slots = kv.slots, kv.columns
        self._weights = _places(weights)
        self._refused = False

    def shape(self, rows: int, length: int) -> tuple[int, int]:
        """Return padded rows and span for this many rows, the longest of which has `length` tokens.

        Rows are rounded up to a quarter of a power of two. This padding is free where a step takes as long as
        reading the weights. Spans are rounded up to an eighth.
        """
        span = rounded_up(length, max(_SPAN, _quarter(length) // 2))
        return min(rounded_up(rows, _quarter(rows)), self._kv.slots), span

    def __call__(self, numbers_3B1: torch.Tensor, span: int) -> torch.Tensor:
        """Return the logits [B, V], in memory that later calls overwrite."""
        if self._refused:
            return self._forward(numbers_3B1, span)
        if self._slots != (self._kv.slots, self._kv.columns):
            self._slots = self._kv.slots, self._kv.columns
            self._graphs.clear()
        key = numbers_3B1.shape[1], span
        graph = self._graphs.pop(key, None)
        if graph is None:
            return self._record_first_step(key, numbers_3B1)
        self._graphs[key] = graph
        own_3B1, replay = graph
        own_3B1.copy_(numbers_3B1)
        return replay()

    def renew(self, weights: Iterable[torch.Tensor]) -> None:
        """Drop all graphs if changed weights are in other memory; otherwise the graphs stay valid."""
        if (places := _places(weights)) != self._weights:
            self._weights = places
            self._graphs.clear()

    def _record_first_step(self, key: tuple[int, int], numbers_3B1: torch.Tensor) -> torch.Tensor:
        """Record a shape, and compare its replay with the plain step. If they differ, steps stay plain."""
        while len(self._graphs) >= _KEPT:
            del self._graphs[next(iter(self._graphs))]
        own_3B1, span = numbers_3B1.clone(), key[1]
        try:
            plain_BV, replay = self._record(lambda: self._forward(own_3B1, span))
            off = logit_error(replay(), plain_BV, plain_BV.dtype)
            if off is not None:
                raise RuntimeError(f"a replay's logits are off by {off} of the largest")
        except RuntimeError as error:
            _LOG.warning("tokens are sampled without CUDA graphs, more slowly: %s", first_line(error))
            self._refused = True
            self._graphs.clear()
            return self._forward(numbers_3B1, span)
        self._graphs[key] = own_3B1, replay
        return plain_BV


def cuda_graphs(device: torch.device) -> Record:
    """Return a recorder of graphs that share memory: each replay overwrites the result of the last."""
    with torch.cuda.device(device):
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(function: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may still allocate memory on the device.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            return graph, function()
        finally:
            graph.capture_end()

    with torch.cuda.stream(stream):
        # Shared memory is freed with the last graph in it, and cannot be allocated again.
        anchor = capture(lambda: torch.zeros(1, device=device))

    def record(function: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, Replay]:
        usual = torch.cuda.current_stream(device)
        stream.wait_stream(usual)
        with torch.cuda.stream(stream):
            plain = function()  # This makes one-time allocations, such as workspaces for matrix products.
            graph, result = capture(function)
        usual.wait_stream(stream)

        def replay(beside: object = anchor) -> torch.Tensor:
            graph.replay()
            return result

        return plain, replay

    return record


def _places(weights: Iterable[torch.Tensor]) -> list[int]:
    return [weight.data_ptr() for weight in weights]


def _quarter(count: int) -> int:
    """Return a quarter of the next power of two, at least 1."""
    return max(1, (1 << (count - 1).bit_length()) // 4)
