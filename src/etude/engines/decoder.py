"""Decoders: each step runs the model on rows of token ids, and samples one more token for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

from etude.engines.fused_llama import FusedLlama, can_fuse
from etude.engines.kv_slots import COLUMN_STEP, KvSlots, SlotTable, rounded_up
from etude.engines.sampler import LiveRow, append_samples
from etude.engines.step_inputs import InputMaker, Prefix, make_ragged_inputs, shared_prefixes, tensor
from etude.models.architecture import layer_kinds, logits_after
from etude.models.device import is_large
from etude.models.policy import Policy

CHUNK = 256
"""Maximum number of one row's tokens in a step. It is fixed, so that a prompt is always cut the same way."""
STEP_TOKENS = 8192
"""Maximum number of tokens of all rows in a step."""
MOST_ROWS = 256
"""Maximum number of rows that are sampled at a time on a CPU."""
PATIENCE = 8
"""Steps that a prompt waits for other prompts before it is read alone."""
_FIXED_ROWS = 32
"""Number of rows in a deterministic step that adds single tokens."""
_FIXED_TOKENS = 512
"""Number of tokens in a deterministic step that reads prompts, padding included."""

_BESIDE, _BESIDE_SMALL = 256, 1024
"""Maximum number of prompt tokens in a step while other rows generate, because these wait for the step. For a
small model, a pass costs more than its tokens."""

_COPIED = 1 << 26
"""Maximum number of parameters of a shared base that each of its policies copies to be faster."""


class SlotDecoder:
    """Continuous batching in padded passes: each pass reads prompts, or adds single tokens.

    With `deterministic`, a row's numbers do not depend on other rows. Matrix products of different shapes
    differ in the last bits, so the shape of every forward pass then follows from the row alone. Rows of like
    shape share a pass, which is padded to a fixed number of rows. Nothing is kept for a conversation's next
    turn, because a token read in a prompt differs from the same token read alone.
    """

    most_rows = MOST_ROWS

    def __init__(self, policy: Policy, *, slots: int, deterministic: bool) -> None:
        """`slots` conversations keep their keys and values between two turns."""
        self._policy = policy
        self._deterministic = deterministic
        self._kinds = layer_kinds(policy.model)
        self._table = SlotTable(slots, least=_FIXED_ROWS if deterministic else 1)
        is_lazy = policy.device.type == "cpu"
        self._kv = KvSlots(len(self._kinds), len(self._table), is_lazy=is_lazy)
        self._postponed = 0
        self._fused = self._make_fused_model()
        self._inputs = InputMaker(policy, self._fused.kv_dtype if self._fused else policy.model.dtype)

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
        if row.slot >= 0:
            self._table.release(row.slot)

    def forget(self) -> None:
        """Drop all slots' contents when the weights change. Rows in flight are read again from the start."""
        self._table.forget()
        del self._fused  # First, or both copies would be in memory at once.
        self._fused = self._make_fused_model()

    def _make_fused_model(self) -> FusedLlama | None:
        is_here = self._policy.device.type == "cpu"
        return FusedLlama(self._policy.model) if is_here and fuses(self._policy) else None

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
        logits_BV: torch.Tensor
        if self._fused is not None:
            last = torch.arange(width - 1, len(slots) * width, width)
            logits_BV = self._fused(self._inputs.pad_left(plan), self._kv, last)
        else:
            logits_BV = self._policy.model(
                input_ids=plan.ids_BT,
                position_ids=plan.position_BT,
                attention_mask=plan.masks if len(plan.masks) > 1 else plan.masks[self._kinds[0]],
                past_key_values=self._kv,
                use_cache=True,
                logits_to_keep=1,
            ).logits[:, -1]
        read = tensor([index for index, row in enumerate(rows) if row.pending == 0], self._policy.device)
        return logits_BV if len(read) == len(slots) else logits_BV[read]


def fuses(policy: Policy) -> bool:
    """Return whether to make a faster copy of the model. Large ones that policies share get none, and on CUDA
    those whose copy would take half of the free memory."""
    parameters = sum(value.numel() for value in policy.model.parameters())
    if policy.device.type == "cuda":
        room = 4 * parameters <= torch.cuda.mem_get_info(policy.device)[0]
    else:
        room = not policy.shares_base or parameters <= _COPIED
    return room and can_fuse(policy.model)


def _fixed_shape(row: LiveRow) -> tuple[int, int]:
    """Return the width and span of the pass that reads the row next, whatever other rows there are."""
    count = min(row.pending, CHUNK)
    width = 1 if count == 1 else max(16, 1 << (count - 1).bit_length())
    return width, rounded_up(1 << (row.cached + count - 1).bit_length(), COLUMN_STEP)


def _fixed_rows(width: int) -> int:
    return _FIXED_ROWS if width == 1 else _FIXED_TOKENS // width


class RaggedDecoder(SlotDecoder):
    """Reads exactly the tokens that each row needs in a pass, without padding, and shared prefixes once."""

    _fused: FusedLlama

    def __init__(self, policy: Policy, *, slots: int) -> None:
        """`slots` conversations keep their keys and values between two turns."""
        super().__init__(policy, slots=slots, deterministic=False)
        self._is_large = is_large(sum(value.numel() for value in policy.model.parameters()))
        self._beside = _BESIDE if self._is_large else _BESIDE_SMALL
        self._generating: list[LiveRow] = []
        """The rows that added single tokens last."""
        self._prefixes: list[Prefix] = []
        """The prefixes that these rows share."""

    @torch.inference_mode()
    def step(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Read prompts while other rows generate; append a token to each row that has been read completely.

        Returns the rows that gained a token. Raises EngineError if the logits are not finite.
        """
        self._take_in(rows)
        generating = [row for row in rows if row.pending == 1]
        reading, counts = self._chunks(rows, len(generating))
        if not generating and not reading:
            return []  # The rows that others wait for were cancelled a moment ago.
        if not reading:
            generating = self._gather_slots(generating)
        generating.sort(key=lambda row: row.slot)
        rows, counts = [*generating, *reading], [*([1] * len(generating)), *counts]
        longest = max(row.cached + count for row, count in zip(rows, counts, strict=True))
        self._kv.reserve(self._table.lengths(), longest)
        prefixes: list[Prefix] = []
        # A layer whose window is shorter than a row reads no whole prefix.
        if generating and self._inputs.looks_back(max(row.cached for row in generating) + 1):
            if generating != self._generating:
                self._generating = generating
                self._prefixes = shared_prefixes(generating, 2 * self._fused.key_size)
            prefixes = self._prefixes
        inputs, last = make_ragged_inputs(rows, counts, self._inputs, self._fused.key_size, prefixes)
        done = [
            index for index, (row, count) in enumerate(zip(rows, counts, strict=True)) if row.pending == count
        ]
        logits_BV = self._fused(inputs, self._kv, tensor([last[index] for index in done]))
        for row, count in zip(rows, counts, strict=True):
            row.cached += count
        grown = [rows[index] for index in done]
        if grown:
            append_samples(grown, logits_BV)
        return grown

    def _chunks(self, rows: Sequence[LiveRow], generating: int) -> tuple[list[LiveRow], list[int]]:
        """Return the rows that read prompt tokens in this step, in order of arrival, and how many each.

        With a small model, prompts wait briefly for others, because a pass costs more than a token.
        """
        chosen, counts = list[LiveRow](), list[int]()
        waiting = [row for row in rows if row.pending > 1 and not self._table.waits(row)]
        if not self._is_large and len(waiting) * 4 < generating and self._postponed < PATIENCE:
            self._postponed += 1
            return chosen, counts
        self._postponed = 0
        left = self._beside if generating else STEP_TOKENS
        for row in waiting:
            if left > 0:
                chosen.append(row)
                # Rows that differ in no token read the last one together.
                counts.append(min(row.pending - self._table.leads(row), CHUNK, left))
                left -= counts[-1]
        return chosen, counts


class RecomputeDecoder:
    """Keeps nothing between two steps, for models whose layers hold more than keys and values.

    With `deterministic`, each row is read alone, so that its numbers do not depend on other rows.
    """

    most_rows = MOST_ROWS

    def __init__(self, policy: Policy, *, deterministic: bool) -> None:
        self._policy = policy
        self._deterministic = deterministic

    @torch.inference_mode()
    def step(self, rows: Sequence[LiveRow]) -> list[LiveRow]:
        """Append a token to every row, and return all rows."""
        device = self._policy.device
        for batch in [[row] for row in rows] if self._deterministic else [rows]:
            width = max(len(row.ids) for row in batch)
            last = [len(row.ids) - 1 for row in batch]
            kept = sorted(set(last))
            padded = torch.tensor([row.ids + [0] * (width - len(row.ids)) for row in batch], device=device)
            logits_BKV = logits_after(self._policy.model, padded, torch.tensor(kept, device=device))
            logits_BV = logits_BKV[range(len(batch)), [kept.index(position) for position in last]]
            append_samples(batch, logits_BV)
        return list(rows)

    def release(self, row: LiveRow) -> None:
        """Do nothing, because nothing is kept."""

    def forget(self) -> None:
        """Do nothing, because nothing is kept."""
