"""Decoding on CUDA: prompts and single tokens in one pass, which is replayed from a recorded graph.

Each row attends to its own slot, wherever that is, so nothing is moved or masked. A graph has the draw of the
next tokens, too. So a pass is one copy to the device, one replay, and one copy back: a thread that launches
hundreds of operations would wait for Python's lock at each, while agents run.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy
import torch

from etude.core.call import Sampling
from etude.core.errors import first_line
from etude.engines.fused_llama import AttendSpans, FusedLlama, flash_attention
from etude.engines.kv_slots import Copy, KvSlots, SlotTable
from etude.engines.sampler import LiveRow, append, append_samples, draw, uniforms
from etude.engines.step_inputs import RaggedInputs, Spans
from etude.models.architecture import logit_error, logits_after, text_config
from etude.models.device import copy_to_device
from etude.models.policy import Policy

_LOG = logging.getLogger("etude.engine")

_CHUNK = 512
"""Maximum number of one row's tokens in a pass."""
_PASS_TOKENS = 8192
"""Maximum number of tokens of all rows in a pass."""
_ROWS = 1024
"""Maximum number of rows that are sampled at a time."""
_COLUMNS = 512
"""Tokens for which each slot has room at first."""
_SHARE = 0.3
"""The share of the device's free memory for keys and values."""
_TOLERANCE = 0.1
"""Difference of logits, relative to their norm, that rounding explains. With SmolLM2-135M in bfloat16 it is
0.04, and 0.14 if attention is wrong by a tenth."""
_COPIED = 1 << 30
"""Bytes of keys and values that are copied at a time."""

Result: TypeAlias = tuple[torch.Tensor, ...]
"""A pass gives logits [R, V], and the ids and logprobs of drawn tokens [2, R], both in float32."""
Replay: TypeAlias = Callable[[], Result]
Record: TypeAlias = Callable[[Callable[[], Result]], tuple[Result, Replay]]
"""Runs a function; returns its result, and a function that repeats it on the current contents of memory.
Raises RuntimeError if the function cannot be recorded."""


class DeviceKv(KvSlots):
    """Key-value slots of all layers in one tensor, in which a copy is one operation."""

    def __init__(self, fused: FusedLlama, device: torch.device, slots: int, columns: int) -> None:
        super().__init__(len(fused.layers), slots)
        self.columns = columns
        shape = (len(fused.layers), 2, slots, fused.groups, columns, fused.size)
        self._all = torch.zeros(shape, dtype=fused.kv_dtype, device=device)
        """[layers, 2, slots, heads, columns, head_dim]"""
        for layer, both in zip(self.layers, self._all, strict=True):
            layer.hold(both)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Copy leading tokens of some slots into others; what follows them there is then undefined."""
        copies = [copy for copy in copies if copy.length]
        if not copies:
            return
        length = max(copy.length for copy in copies)
        pairs = torch.tensor([[copy.source, copy.target] for copy in copies]).t()
        sources, targets = copy_to_device(pairs, self._all.device)
        size = self._all[0, :, 0, :, :length].numel() * len(copies) * self._all.element_size()
        for part in torch.split(self._all, max(1, _COPIED // size)):
            part[:, :, targets, :, :length] = part[:, :, sources, :, :length]


@dataclass(frozen=True, slots=True)
class PassShape:
    """The padded size of a pass."""

    tokens: int
    rows: int
    longest: int
    """Maximum number of a row's tokens."""

    @classmethod
    def from_counts(cls, counts: Sequence[int]) -> Self:
        """Return the shape for rows with these numbers of tokens.

        Passes of single tokens are padded to a quarter of a power of two, which is free where a pass takes as
        long as reading the weights. Others are padded more, so that there are few shapes.
        """
        rows, tokens = len(counts), sum(counts)
        if tokens == rows:
            step = max(1, (1 << (rows - 1).bit_length()) // 4)
            padded = -(-rows // step) * step
            return cls(padded, padded, 1)
        padded = next(size for size in (64, 256, 1024, rows) if size >= rows)
        return cls(max(256, 1 << (tokens - 1).bit_length()), padded, _CHUNK)


class GraphDecoder:
    """Continuous batching by recorded passes, for models that `FusedLlama` supports."""

    def __init__(
        self, policy: Policy, record: Record | None = None, attend: AttendSpans = flash_attention
    ) -> None:
        """`record` and `attend` are CUDA's by default."""
        self._policy, self._attend = policy, attend
        self._record: Record | None = record or cuda_graphs(policy.device)
        """None once a pass could not be recorded."""
        self._fused = FusedLlama(policy.model, attend)
        self._weights = self._places_of_weights()
        self._refresh: Replay | None = None
        """Takes changed weights from the same memory."""
        token = 2 * len(self._fused.layers) * self._fused.key_size * self._fused.kv_dtype.itemsize
        is_cuda = policy.device.type == "cuda"  # Tests take another device.
        free = torch.cuda.mem_get_info(policy.device)[0] if is_cuda else 1 << 28
        self._tokens = int(_SHARE * free) // token
        """Tokens for whose keys and values there is memory."""
        self._begin(_COLUMNS)

    @property
    def most_rows(self) -> int:
        """Number of rows that memory has room for."""
        return len(self._table)

    @torch.inference_mode()
    def step(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Read prompts and add single tokens; append a token to each row that has been read completely.

        Returns the rows that gained a token. Raises EngineError if the logits are not finite.
        """
        self._take_in(rows)
        chosen, counts, left = list[LiveRow](), list[int](), _PASS_TOKENS
        for row in rows:
            if left > 0 and not self._table.waits(row):
                chosen.append(row)
                counts.append(min(row.pending, _CHUNK, left))
                left -= counts[-1]
        if not chosen:
            return []  # The rows that others wait for were cancelled a moment ago.
        done = [row.pending == count for row, count in zip(chosen, counts, strict=True)]
        grown = [row for row, is_done in zip(chosen, done, strict=True) if is_done]
        plain = all(row.shaper is None and not row.top for row in grown)
        logits_RV, drawn_2R = self._run(chosen, counts, done if plain else [False] * len(done))
        for row, count in zip(chosen, counts, strict=True):
            row.cached += count
        if plain:
            ids, logprobs = drawn_2R.tolist()
            places = [index for index, is_done in enumerate(done) if is_done]
            append(grown, [int(ids[place]) for place in places], [logprobs[place] for place in places])
        elif grown:
            is_done = torch.tensor(done, device=logits_RV.device)
            append_samples(grown, logits_RV[: len(done)][is_done])
        return grown

    def release(self, row: LiveRow) -> None:
        """Release a finished row. Its slot keeps the tokens read until another conversation needs it."""
        if row.slot >= 0:
            self._table.release(row.slot)

    def forget(self) -> None:
        """Drop all slots' contents when the weights change. Rows in flight are read again from the start."""
        self._table.forget()
        places = self._places_of_weights()
        if places != self._weights:
            self._weights, self._refresh = places, None
            self._graphs.clear()
            del self._fused  # First, or both copies would be in memory at once.
            self._fused = FusedLlama(self._policy.model, self._attend)
        elif self._refresh is not None:
            self._refresh()
        elif self._record is not None:
            _, self._refresh = self._record(self._take_weights)
        else:
            self._take_weights()

    def _take_weights(self) -> Result:
        self._fused.refresh(self._policy.model)
        return ()

    def why_wrong(self) -> str | None:
        """Return why this decoder's logits are not the model's own, in a trial of both kinds of pass.

        Raises what the kernels raise.
        """
        model, device = self._policy.model, self._policy.device
        # Not the first ids: a real model's logits after special tokens depend on every rounding.
        first = text_config(model).vocab_size // 3
        trial = [[first + each for each in ids] for ids in ([3, 7, 5, 9, 4, 8, 6], [9, 3, 5, 7])]
        rows = [LiveRow("", ids, Sampling(), uniforms(0)) for ids in trial]
        self._take_in(rows)
        self._run(rows, [len(ids) - 1 for ids in trial], [False] * len(rows))
        for row in rows:
            row.cached = len(row.ids) - 1
        logits_RV = self._run(rows, [1] * len(rows), [False] * len(rows))[0][: len(rows)].clone()
        self._table.forget()
        for row in rows:
            self.release(row)
        last = [torch.tensor([len(ids) - 1], device=device) for ids in trial]
        read = zip((torch.tensor([ids], device=device) for ids in trial), last, strict=True)
        plain_RV = torch.cat([logits_after(model, ids_1T, last_1)[0] for ids_1T, last_1 in read]).float()
        plain_RV, logits_RV = (each - each.mean(dim=-1, keepdim=True) for each in (plain_RV, logits_RV))
        off = float((logits_RV - plain_RV).norm() / plain_RV.norm())
        return None if off < _TOLERANCE else f"its logits are off by {off:.2g} of their norm"

    def _places_of_weights(self) -> list[int]:
        return [weight.data_ptr() for weight in self._policy.model.parameters()]

    def _begin(self, columns: int, rows: Sequence[LiveRow] = ()) -> None:
        """Make slots with room for `columns` tokens each; all rows are read again from the start."""
        self._graphs: dict[PassShape, tuple[torch.Tensor, Replay]] = {}
        """The memory of a pass's numbers, and the graph that reads them and the slots."""
        self.__dict__.pop("_kv", None)  # Or both would be in memory at once.
        slots = max(min(_ROWS, self._tokens // columns), 64, len(rows))
        self._table = SlotTable(slots, least=slots)
        self._kv: DeviceKv = DeviceKv(self._fused, self._policy.device, slots, columns)
        for row in rows:
            row.slot, row.cached = -1, 0

    def _take_in(self, rows: Sequence[LiveRow]) -> None:
        """Give slots to new rows, and copy the tokens that they need not read."""
        longest = max(len(row.ids) for row in rows)
        if longest >= self._kv.columns:
            self._begin(1 << longest.bit_length(), rows)
        for row in rows:
            if row.slot < 0:
                self._table.place(row, reuse=True)
        self._kv.copy(self._table.copies())

    def _pack(
        self, shape: PassShape, rows: Sequence[LiveRow], counts: Sequence[int], draws: Sequence[bool]
    ) -> torch.Tensor:
        """Return a pass's numbers, int32: per token its id, position, slot and column, [4, T]; per row the
        first token's place, the slot, the length, the last token's place, a uniform number as float32, and
        whether it is greedy, [6, R + 1]. Padding reads the first slot's first column, and writes its last."""
        T, R = shape.tokens, shape.rows
        numbers = numpy.zeros(4 * T + 6 * (R + 1), numpy.int32)
        tokens_4T, rows_6R = numbers[: 4 * T].reshape(4, T), numbers[4 * T :].reshape(6, R + 1)
        tokens_4T[3], rows_6R[2] = self._kv.columns - 1, 1
        if shape.longest == 1:
            count = len(rows)
            tokens_4T[0, :count] = [row.ids[row.cached] for row in rows]
            tokens_4T[1, :count] = tokens_4T[3, :count] = [row.cached for row in rows]
            tokens_4T[2, :count] = [row.slot for row in rows]
            rows_6R[0] = numpy.arange(R + 1)
        else:
            start = 0
            for row, count in zip(rows, counts, strict=True):
                row_tokens_4T = tokens_4T[:, start : start + count]
                row_tokens_4T[0], row_tokens_4T[2] = row.ids[row.cached : row.cached + count], row.slot
                row_tokens_4T[1] = row_tokens_4T[3] = numpy.arange(row.cached, row.cached + count)
                start += count
            rows_6R[0] = start
            rows_6R[0, : len(rows)] = numpy.cumsum([0, *counts[:-1]])
        live_6R = rows_6R[:, : len(rows)]
        live_6R[1] = [row.slot for row in rows]
        live_6R[2] = [row.cached + count for row, count in zip(rows, counts, strict=True)]
        live_6R[3] = live_6R[0] + counts - 1
        uniform = [next(row.uniform) if drawn else 0.0 for row, drawn in zip(rows, draws, strict=True)]
        live_6R[4] = numpy.asarray(uniform, numpy.float32).view(numpy.int32)
        live_6R[5] = [row.sampling.temperature == 0 for row in rows]
        return torch.from_numpy(numbers)

    def _run(self, rows: Sequence[LiveRow], counts: Sequence[int], draws: Sequence[bool]) -> Result:
        """Read the next `counts` tokens of the rows; return the logits after them, and draws for some."""
        shape = PassShape.from_counts(counts)
        numbers = self._pack(shape, rows, counts, draws)
        if shape not in self._graphs:
            return self._record_pass(shape, numbers, len(rows))
        own, replay = self._graphs[shape]
        own.copy_(numbers, non_blocking=True)
        return replay()

    def _record_pass(self, shape: PassShape, numbers: torch.Tensor, rows: int) -> Result:
        """Record a pass, and compare its replay with the plain one. If they differ, passes stay plain."""
        own = numbers.to(self._policy.device)
        if self._record is None:
            return self._pass(shape, own)
        try:
            plain, replay = self._record(lambda: self._pass(shape, own))
            logits_RV = plain[0][:rows].clone()
            off = logit_error(replay()[0][:rows], logits_RV, self._policy.model.dtype)
            if off is not None:
                raise RuntimeError(f"a replay's logits are off by {off} of the largest")
        except RuntimeError as error:
            _LOG.warning("tokens are sampled without CUDA graphs, more slowly: %s", first_line(error))
            self._record = None
            self._graphs.clear()
            return self._pass(shape, own)
        self._graphs[shape] = own, replay
        return replay()

    def _pass(self, shape: PassShape, numbers: torch.Tensor) -> Result:
        """Run the model on numbers on its device, and draw tokens."""
        ids_T, position_T, slot_T, column_T = numbers[: 4 * shape.tokens].view(4, -1)
        start_R, slot_R, length_R, last_R, uniform_R, greedy_R = (
            each.contiguous() for each in numbers[4 * shape.tokens :].view(6, -1)
        )
        count = shape.rows
        spans = Spans(start_R, slot_R[:count], length_R[:count], shape.longest)
        inputs = RaggedInputs(ids_T, position_T, slot_T, column_T, [], spans)
        logits_RV = self._fused(inputs, self._kv, last_R[:count])
        uniform_R1 = uniform_R.view(torch.float32)[:count, None]
        probs_RV = torch.softmax(logits_RV, dim=-1)
        ids_R, logprobs_R = draw(probs_RV, uniform_R1, greedy_R[:count, None] > 0)
        return logits_RV, torch.stack([ids_R.float(), logprobs_R])


def cuda_graphs(device: torch.device) -> Record:
    """Return a recorder of graphs that share memory: each replay overwrites the result of the last."""
    with torch.cuda.device(device):
        pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def capture(function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        graph = torch.cuda.CUDAGraph()
        # Other threads may still allocate memory on the device.
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            return graph, function()
        finally:
            graph.capture_end()

    with torch.cuda.stream(stream):
        # Shared memory is freed with the last graph in it, and cannot be allocated again.
        zero = torch.zeros(1, device=device)
        anchor = capture(lambda: (zero + 1, zero + 2))

    def record(function: Callable[[], Result]) -> tuple[Result, Replay]:
        usual = torch.cuda.current_stream(device)
        stream.wait_stream(usual)
        with torch.cuda.stream(stream):
            plain = function()  # This makes one-time allocations, such as workspaces for matrix products.
            graph, result = capture(function)
        usual.wait_stream(stream)

        def replay(beside: object = anchor) -> Result:
            graph.replay()
            return result

        return plain, replay

    return record
