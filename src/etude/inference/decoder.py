"""Decoding steps: rows of token ids in, one more sampled token for each.

Two ways of running the model, behind one method. `SlotDecoder` keeps keys and values per
conversation; `RecomputeDecoder` runs the whole sequence every time, for models whose layers keep
another kind of state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from etude.core.call import Sampling
from etude.inference.kv_slots import KvSlots, StepPlan, span_for
from etude.inference.sampler import sample
from etude.models.policy import Policy

_PREFILL_CHUNK = 256
"""Tokens of one row that a step reads at most. Fixed, so that a prompt is cut the same every time."""
_STEP_TOKENS = 8192
"""Tokens of all rows together that a step reads at most."""
_PATIENCE = 8
"""Steps that a prompt waits for others before it is read alone."""


@dataclass(slots=True, eq=False)
class Row:
    """One sequence being sampled."""

    conversation: str
    ids: list[int]
    """Prompt, then what was sampled."""
    sampling: Sampling
    uniform: Iterator[float]
    logprobs: list[float] = field(default_factory=list)
    slot: int = -1
    cached: int = 0
    """Leading tokens whose keys and values are in the slot."""

    @property
    def pending(self) -> int:
        """Tokens that the model has not read yet."""
        return len(self.ids) - self.cached


class Decoder(Protocol):
    """Runs the model."""

    def step(self, rows: Sequence[Row]) -> list[Row]:
        """Read pending tokens of some rows, and append a token to each row that has been read whole.

        Returns the rows that gained a token.
        """

    def release(self, row: Row) -> None:
        """The row is finished or cancelled."""

    def forget(self) -> None:
        """The weights changed: nothing kept is valid."""


def make_decoder(policy: Policy, *, slots: int, deterministic: bool) -> Decoder:
    """The fastest decoder that is right for the policy's architecture."""
    kinds = set(_layer_types(policy.model))
    if kinds <= {"full_attention", "sliding_attention"}:
        return SlotDecoder(policy, slots=slots, deterministic=deterministic)
    return RecomputeDecoder(policy)


class SlotDecoder:
    """Continuous batching over key-value slots.

    With `deterministic`, a row's numbers do not depend on its neighbours: steps never have fewer than
    eight rows (below that, matrix products take another path), and a conversation's cache is not
    carried over to its next turn (a token read in a prompt and one read alone differ in the last bit).
    """

    def __init__(self, policy: Policy, *, slots: int, deterministic: bool) -> None:
        self._policy = policy
        self._deterministic = deterministic
        self._least_rows = 8 if deterministic else 1
        self._kv = KvSlots(len(_layer_types(policy.model)), max(slots, self._least_rows))
        self._held: list[_Held] = [_Held() for _ in range(self._kv.slots)]
        self._clock = 0
        self._postponed = 0

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Row]:
        """See `Decoder.step`. Reading prompts and adding single tokens are separate steps.

        Prompts wait for company (reading one costs as much as reading many), but not for long.
        """
        for row in rows:
            if row.slot < 0:
                self._place(row)
        reading = [row for row in rows if row.pending > 1]
        speaking = [row for row in rows if row.pending == 1]
        if reading and (len(reading) * 4 >= len(speaking) or self._postponed >= _PATIENCE):
            batch, self._postponed = reading[: _STEP_TOKENS // _PREFILL_CHUNK], 0
        else:
            batch, self._postponed = self._gathered(speaking), self._postponed + 1
        logits_BV = self._forward(batch)
        whole = [index for index, row in enumerate(batch) if row.pending == 0]
        if whole:
            append_samples([batch[index] for index in whole], logits_BV[whole])
        return [batch[index] for index in whole]

    def release(self, row: Row) -> None:
        """Keep the slot's contents for the conversation's next turn."""
        if row.slot >= 0:
            held = self._held[row.slot]
            held.row, held.ids = None, row.ids[: row.cached]

    def forget(self) -> None:
        """Drop every slot; rows in flight are read again from their start."""
        for held in self._held:
            held.ids = []
            if held.row is not None:
                held.row.cached = 0

    def _place(self, row: Row) -> None:
        """Give the row the slot that holds most of its tokens, else an unused one, else the oldest."""
        self._clock += 1
        idle = [slot for slot, held in enumerate(self._held) if held.row is None]
        if not idle:
            idle = [len(self._held)]
            self._held.extend(_Held() for _ in range(max(8, len(self._held) // 2)))
            self._kv.reserve(len(self._held), 0)
        own = [slot for slot in idle if self._held[slot].conversation == row.conversation]
        slot = own[0] if own else min(idle, key=lambda slot: self._held[slot].used)
        held = self._held[slot]
        if own and not self._deterministic:
            row.cached = _common_prefix(held.ids, row.ids[:-1])
        held.row, held.conversation, held.used, held.ids = row, row.conversation, self._clock, []
        row.slot = slot

    def _gathered(self, rows: Sequence[Row]) -> list[Row]:
        """The rows in slot order, their slots brought to the front: attention then reads them in place."""
        wanted = {row.slot for row in rows}
        free = (slot for slot in range(len(rows)) if slot not in wanted)
        for row in rows:
            if row.slot >= len(rows):
                self._swap(row.slot, next(free))
        return sorted(rows, key=lambda row: row.slot)

    def _swap(self, first: int, second: int) -> None:
        self._kv.swap(first, second)
        held = self._held
        held[first], held[second] = held[second], held[first]
        for slot in (first, second):
            row = held[slot].row
            if row is not None:
                row.slot = slot

    def _forward(self, rows: Sequence[Row]) -> torch.Tensor:
        """Logits [B, V] after each row's last token read; marks those tokens as cached."""
        device = self._policy.device
        counts = [min(row.pending, _PREFILL_CHUNK) for row in rows]
        width = max(counts)
        if self._deterministic and width > 1:
            width = -(-width // 8) * 8
        length = max(row.cached + count for row, count in zip(rows, counts, strict=True))
        self._kv.reserve(self._kv.slots, length)
        ids, positions, columns = [], [], []
        for row, count in zip(rows, counts, strict=True):
            padding = width - count
            here = range(row.cached, row.cached + count)
            ids.append([0] * padding + row.ids[here.start : here.stop])
            positions.append([0] * padding + list(here))
            columns.append([self._kv.waste] * padding + list(here))
        slots = [row.slot for row in rows]
        for _ in range(self._least_rows - len(rows)):
            ids.append([0] * width)
            positions.append([0] * width)
            columns.append([self._kv.waste] * width)
            slots.append(next(slot for slot in range(self._kv.slots) if slot not in slots))
        position_BT = torch.tensor(positions, device=device)
        span = span_for(length)
        self._kv.plan = StepPlan(
            rows=torch.tensor(slots, device=device),
            columns=torch.tensor(columns, device=device),
            span=span,
            leading=slots == list(range(len(slots))),
        )
        output = self._policy.model(
            input_ids=torch.tensor(ids, device=device),
            position_ids=position_BT,
            attention_mask=self._masks(position_BT, span),
            past_key_values=self._kv,
            use_cache=True,
            logits_to_keep=1,
        )
        for row, count in zip(rows, counts, strict=True):
            row.cached += count
        logits_BV: torch.Tensor = output.logits[: len(rows), -1]
        return logits_BV

    def _masks(self, position_BT: torch.Tensor, span: int) -> Any:
        """Additive masks [B, 1, T, span]: one, or one per kind of layer where the model has several."""
        config = self._policy.model.config
        kinds = sorted(set(_layer_types(self._policy.model)))
        window = getattr(config, "sliding_window", None) or span
        masks = {
            kind: _additive_mask(
                position_BT, span, window if kind == "sliding_attention" else span, self._dtype
            )
            for kind in kinds
        }
        return masks if len(kinds) > 1 else masks[kinds[0]]

    @property
    def _dtype(self) -> torch.dtype:
        return next(self._policy.model.parameters()).dtype  # type: ignore[no-any-return]


class RecomputeDecoder:
    """Reads every sequence from its start at every step: slow, and right for any causal model."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def step(self, rows: Sequence[Row]) -> list[Row]:
        """See `Decoder.step`: every row gains a token."""
        device = self._policy.device
        width = max(len(row.ids) for row in rows)
        last = [len(row.ids) - 1 for row in rows]
        kept = sorted(set(last))
        padded = [row.ids + [0] * (width - len(row.ids)) for row in rows]
        logits_BKV = self._policy.model(
            input_ids=torch.tensor(padded, device=device),
            use_cache=False,
            logits_to_keep=torch.tensor(kept, device=device),
        ).logits
        picked = [kept.index(position) for position in last]
        append_samples(rows, logits_BKV[range(len(rows)), picked])
        return list(rows)

    def release(self, row: Row) -> None:
        """Nothing is kept."""

    def forget(self) -> None:
        """Nothing is kept."""


def append_samples(rows: Sequence[Row], logits_BV: torch.Tensor) -> None:
    """Draw one token for each row from its logits."""
    device = logits_BV.device
    ids_B, logprobs_B = sample(
        logits_BV,
        torch.tensor([row.sampling.temperature for row in rows], device=device),
        torch.tensor([row.sampling.top_p for row in rows], device=device),
        torch.tensor([next(row.uniform) for row in rows], device=device),
    )
    for row, token, logprob in zip(rows, ids_B.tolist(), logprobs_B.tolist(), strict=True):
        row.ids.append(token)
        row.logprobs.append(logprob)


@dataclass(slots=True)
class _Held:
    """What a slot holds, and for whom."""

    conversation: str = ""
    ids: list[int] = field(default_factory=list)
    row: Row | None = None
    used: int = 0


def _layer_types(model: Any) -> list[str]:
    config = model.config.get_text_config()
    count = config.num_hidden_layers
    if getattr(config, "layer_types", None):
        return list(config.layer_types)[:count]
    if any(hasattr(config, name) for name in ("ssm_cfg", "state_size", "attention_chunk_size")):
        return ["other"] * count
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * count


def _additive_mask(position_BT: torch.Tensor, span: int, window: int, dtype: torch.dtype) -> torch.Tensor:
    column_S = torch.arange(span, device=position_BT.device)
    seen_BTS = column_S <= position_BT[..., None]
    if window < span:
        seen_BTS &= column_S > position_BT[..., None] - window
    mask = torch.zeros(seen_BTS.shape, dtype=dtype, device=position_BT.device)
    return mask.masked_fill_(~seen_BTS, torch.finfo(dtype).min)[:, None]


def _common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    if list(first) == list(second[: len(first)]):
        return len(first)
    return next(
        (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b),
        min(len(first), len(second)),
    )
