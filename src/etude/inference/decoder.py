"""Decoders: run the model one step, rows of token ids in, one more sampled token for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TypeAlias

import torch

from etude.core.errors import RequestError
from etude.inference.drafter import Drafter
from etude.inference.fused_llama import FusedLlama, SingleTokens
from etude.inference.fused_weights import can_fuse
from etude.inference.kv_slots import InputMaker, KvSlots, StepInputs, span_for, tensor
from etude.inference.sampler import Row, append_samples
from etude.inference.slot_table import SlotTable
from etude.models.architecture import layer_kinds, logits_after, takes_key_value_slots
from etude.models.device import is_large
from etude.models.policy import Policy

_CHUNK = 256
"""Tokens of one row that a step reads at most. Fixed, so that a prompt is cut the same every time."""
_STEP_TOKENS = 8192
"""Tokens of all rows together that a step reads at most."""
_PATIENCE = 8
"""Steps that a prompt waits for others before it is read alone."""
_SPAN_STEP = 16
"""Columns that attention spans are a multiple of this."""
_FIXED_ROWS = 32
"""Deterministic: rows of every step that adds single tokens."""
_FIXED_TOKENS = 512
"""Deterministic: tokens of every step that reads prompts, padding included."""

_COPIED = 1 << 26
"""Parameters at most of a shared base that each of its policies has a copy of, to be faster."""


def make_decoder(
    policy: Policy,
    *,
    slots: int,
    deterministic: bool,
    eight_bits: bool = False,
    speculates: bool | None = False,
) -> Decoder:
    """The fastest decoder that is right for the policy's architecture.

    One that `speculates` reads drafts where that is likely to pay; None is for large models only. With
    `eight_bits` it samples from rounded weights. Raises RequestError where that is not known.
    """
    if eight_bits and not can_fuse(policy.model):
        raise RequestError(
            "sampling_weights: int8 is for Llama, Mistral, Qwen2, Qwen3 and Gemma on a CPU, not for this "
            "model; leave it out"
        )
    if deterministic and policy.device.type == "cpu":
        # How many threads share a sum, and how, would depend on what else the machine does.
        torch.set_num_threads(1)
    if takes_key_value_slots(policy.model):
        return SlotDecoder(
            policy,
            slots=slots,
            deterministic=deterministic,
            eight_bits=eight_bits,
            speculates=speculates,
        )
    return RecomputeDecoder(policy, deterministic=deterministic)


class RecomputeDecoder:
    """Keeps nothing between two steps, for models whose layers hold more than keys and values.

    With `deterministic`, every row is read alone: then its numbers do not depend on its neighbours.
    """

    def __init__(self, policy: Policy, *, deterministic: bool) -> None:
        self._policy = policy
        self._deterministic = deterministic

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Row]:
        """Append a token to every row. Returns the rows that gained one: all."""
        for batch in [[row] for row in rows] if self._deterministic else [rows]:
            append_samples(batch, self._logits(batch))
        return list(rows)

    def release(self, row: Row) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""

    def _logits(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [B, V] after each row's last token."""
        device = self._policy.device
        width = max(len(row.ids) for row in rows)
        last = [len(row.ids) - 1 for row in rows]
        kept = sorted(set(last))
        padded = [row.ids + [0] * (width - len(row.ids)) for row in rows]
        logits_BKV = logits_after(
            self._policy.model, torch.tensor(padded, device=device), torch.tensor(kept, device=device)
        )
        return logits_BKV[range(len(rows)), [kept.index(position) for position in last]]


class SlotDecoder:
    """Continuous batching over key-value slots: keeps what a conversation has read, and reads what is new.

    With `deterministic`, a row's numbers do not depend on its neighbours. The shape of every forward
    pass then follows from the row alone (matrix products of another shape differ in the last bits):
    rows of like shape go together, filled up to a fixed number. And nothing is carried over to a
    conversation's next turn, since a token read in a prompt and one read alone differ as well.
    """

    def __init__(
        self, policy: Policy, *, slots: int, deterministic: bool, eight_bits: bool, speculates: bool | None
    ) -> None:
        """`slots` conversations keep what they have read between two turns."""
        self._policy = policy
        self._deterministic, self._eight_bits = deterministic, eight_bits
        self._kinds = layer_kinds(policy.model)
        self._table = SlotTable(slots, least=_FIXED_ROWS if deterministic else 1)
        self._kv = KvSlots(len(self._kinds), len(self._table))
        self._inputs = InputMaker(
            policy, torch.float32 if eight_bits else next(policy.model.parameters()).dtype
        )
        self._postponed = 0
        self._going: SingleTokens | None = None
        self._fused = _fused(policy, eight_bits)
        self._drafter: Drafter | None = None
        if speculates is not False and self._fused is not None and not deterministic:
            large = is_large(sum(value.numel() for value in policy.model.parameters()))
            if speculates or large:
                self._drafter = Drafter(is_small=not large)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Row]:
        """Read prompts or add single tokens; append a token to each row that has been read whole.

        Returns the rows that gained a token. Those that are ahead gain the next one for nothing, before any
        goes on: so all have a part in each forward pass. Raises EngineError when the logits are not finite.
        """
        if ahead := [row for row in rows if row.ahead]:
            for row in ahead:
                row.go_on()
            return ahead
        if new := [row for row in rows if row.slot < 0]:
            self._take_in(new, rows)
        self._kv.copy(self._table.copies())
        grown: list[Row] = []
        for batch in self._batches(rows):
            if batch[0].pending == 1 and not self._deterministic:
                self._speak(batch)
                grown += batch
                continue
            logits_BV = self._forward(batch)
            if read := [row for row in batch if row.pending == 0]:
                append_samples(read, logits_BV)
                grown += read
        return grown

    def release(self, row: Row) -> None:
        """The row is over. The tokens read stay in the slot, until another conversation needs it."""
        self._table.release(row)

    def forget(self) -> None:
        """The weights changed: the slots' contents go. Rows in flight are read again from their start."""
        self._table.forget()
        self._fused = _fused(self._policy, self._eight_bits)
        self._going = None

    def _batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """The rows of this step's forward passes.

        Prompts wait for company (reading one costs as much as reading many), but not for long.
        """
        reading = [row for row in rows if row.pending > 1 and not self._table.waits(row)]
        speaking = [row for row in rows if row.pending == 1] if len(reading) < len(rows) else []
        if reading and (len(reading) * 4 >= len(speaking) or self._postponed >= _PATIENCE):
            self._postponed = 0
            chosen = _within_budget(reading)
        else:
            self._postponed += 1
            chosen = speaking
        if not chosen:
            return  # Those whom others wait for were cancelled a moment ago.
        if not self._deterministic:
            yield self._gathered(chosen) if chosen is speaking else chosen
            return
        alike = defaultdict(list)
        for row in chosen:
            alike[_fixed_shape(row)].append(row)
        for (width, _), group in sorted(alike.items()):
            size = _fixed_rows(width)
            yield from (group[start : start + size] for start in range(0, len(group), size))

    def _take_in(self, new: Sequence[Row], rows: Sequence[Row]) -> None:
        """Give slots to new rows, in front of what earlier ones left."""
        for row in new:
            self._table.place(row, reuse=not self._deterministic)
        self._kv.reserve(len(self._table), 0)
        if not self._deterministic:
            self._kv.copy(self._table.copies())
            self._gathered(rows)

    def _gathered(self, rows: Sequence[Row]) -> list[Row]:
        """The rows in slot order, their slots brought to the front: attention then reads them in place."""
        count = len(rows)
        outside = [row.slot for row in rows if row.slot >= count]
        if outside:
            inside = {row.slot for row in rows}
            free = (slot for slot in range(count) if slot not in inside)
            pairs = zip(outside, free, strict=False)
            self._kv.copy([copy for pair in pairs for copy in self._table.swap(*pair)])
        return sorted(rows, key=lambda row: row.slot)

    def _speak(self, rows: list[Row]) -> None:
        """Append a token to each row, and draw further ones ahead where drafts come true."""
        drafts = self._drafter.drafts(rows) if self._drafter is not None else []
        if not drafts:
            append_samples(rows, self._one_more(rows))
            return
        append_samples(rows, self._after_drafts(rows, drafts), drafts)
        for row in rows:
            # Keys and values of what was refused lie beyond, where the next tokens are written.
            row.cached += 1 + len(row.ahead)

    def _after_drafts(self, rows: list[Row], drafts: Sequence[list[int]]) -> torch.Tensor:
        """Logits after the last token of each row, and after each of its draft, [., V]."""
        assert self._fused is not None
        width = 1 + max(map(len, drafts))
        span = _span(max(len(row.ids) for row in rows) + width - 1)
        self._kv.reserve(len(self._table), span)
        slots = [row.slot for row in rows]
        for row, draft in zip(rows, drafts, strict=True):
            row.ids += draft
        leading = slots == list(range(len(slots)))
        inputs = self._inputs.padded(rows, slots, (width, span), self._kv, leading=leading)
        read = list[int]()
        for end, row, draft in zip(range(width, width * len(rows) + 1, width), rows, drafts, strict=True):
            del row.ids[len(row.ids) - len(draft) :]
            read += range(end - len(draft) - 1, end)
        return self._fused(inputs, self._kv, tensor(read, self._policy.device))

    def _one_more(self, rows: list[Row]) -> torch.Tensor:
        """Logits [B, V] after the last token of each row; marks it as cached. They are in the first slots."""
        positions, going = [row.cached for row in rows], self._going
        span = _span(max(positions) + 1)
        if self._fused is None or not self._inputs.looks_back(span):
            return self._forward(rows)
        if going is None or not going.serves(len(rows), span, self._kv):
            self._kv.reserve(len(self._table), span)
            going = self._going = SingleTokens(self._fused, self._kv, len(rows), span)
        logits_BV = going([row.ids[-1] for row in rows], positions)
        for row in rows:
            row.cached += 1
        return logits_BV

    def _forward(self, rows: list[Row]) -> torch.Tensor:
        """Logits after each of the rows that are read whole then, [., V]; marks the tokens read as cached."""
        counts = [min(row.pending, _CHUNK) for row in rows]
        if self._deterministic:
            width, span = _fixed_shape(rows[0])
            fill = _fixed_rows(width) - len(rows)
        else:
            width, fill = max(counts), 0
            span = _span(max(row.cached + count for row, count in zip(rows, counts, strict=True)))
        self._kv.reserve(len(self._table), span)
        slots = [row.slot for row in rows]
        if fill:
            taken = set(slots)
            # Rows of padding write to the waste bin of slots that others own, and harm nothing there.
            slots += islice((slot for slot in range(len(self._table)) if slot not in taken), fill)
        # In deterministic mode slots are always copied, so that memory looks the same wherever they are.
        leading = not self._deterministic and slots == list(range(len(slots)))
        inputs = self._inputs.padded(rows, slots, (width, span), self._kv, leading=leading)
        for row, count in zip(rows, counts, strict=True):
            row.cached += count
        read = tensor([index for index, row in enumerate(rows) if row.pending == 0], self._policy.device)
        if self._fused is not None and not self._deterministic:
            last = read * width + width - 1
            return self._fused(inputs, self._kv, last if len(read) < len(slots) else None)
        logits_BV = self._logits(inputs)
        return logits_BV if len(read) == len(slots) else logits_BV[read]

    def _logits(self, inputs: StepInputs) -> torch.Tensor:
        """After each row's last token, [B, V]."""
        if self._fused is not None:
            return self._fused(inputs, self._kv)
        masks = inputs.masks
        output = self._policy.model(
            input_ids=inputs.ids_BT,
            position_ids=inputs.position_BT,
            attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
            past_key_values=self._kv,
            use_cache=True,
            logits_to_keep=1,
        )
        logits_BV: torch.Tensor = output.logits[:, -1]
        return logits_BV


Decoder: TypeAlias = SlotDecoder | RecomputeDecoder


def _fused(policy: Policy, eight_bits: bool) -> FusedLlama | None:
    """A copy of the model that is faster; of a large one that several policies share, only in eight bits."""
    parameters = sum(value.numel() for value in policy.model.parameters()) if policy.shares_base else 0
    if not eight_bits and (parameters > _COPIED or not can_fuse(policy.model)):
        return None
    return FusedLlama(policy.model, eight_bits=eight_bits)


def _within_budget(rows: list[Row]) -> list[Row]:
    """As many rows as a step may read, the longest waiting first."""
    width = 0
    for index, row in enumerate(rows):
        width = max(width, min(row.pending, _CHUNK))
        if index and width * (index + 1) > _STEP_TOKENS:
            return rows[:index]
    return rows


def _span(length: int) -> int:
    """Columns that attention spans where it need not be the same whatever the company."""
    return -(-length // _SPAN_STEP) * _SPAN_STEP


def _fixed_shape(row: Row) -> tuple[int, int]:
    """Width and span of the forward pass that reads the row next, whatever its company."""
    count = min(row.pending, _CHUNK)
    width = 1 if count == 1 else max(16, 1 << (count - 1).bit_length())
    return width, span_for(1 << (row.cached + count - 1).bit_length())


def _fixed_rows(width: int) -> int:
    return _FIXED_ROWS if width == 1 else _FIXED_TOKENS // width
