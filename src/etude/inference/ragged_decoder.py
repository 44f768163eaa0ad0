"""Decoding with the fused forward pass: prompts are read in chunks beside rows that speak."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from etude.inference.drafter import Drafter
from etude.inference.fused_llama import FusedLlama
from etude.inference.kv_slots import span_of, tensor
from etude.inference.ragged import ragged
from etude.inference.sampler import Row, append_samples
from etude.inference.shared_prefixes import Reading, plan_of
from etude.inference.single_tokens import SingleTokens
from etude.inference.slot_decoder import CHUNK, PATIENCE, STEP_TOKENS, SlotDecoder
from etude.inference.split_attention import once
from etude.models.device import is_large
from etude.models.policy import Policy

_BESIDE, _BESIDE_SMALL = 256, 1024
"""Tokens of prompts that a step reads at most while rows speak: these stand still for as long. A pass costs a
small model more than its tokens."""


class RaggedDecoder(SlotDecoder):
    """Each pass has as many tokens of each row as that row needs, none of them padding."""

    _fused: FusedLlama

    def __init__(self, policy: Policy, *, slots: int, eight_bits: bool, speculates: bool | None) -> None:
        """`slots` conversations keep what they have read between two turns."""
        super().__init__(policy, slots=slots, deterministic=False, eight_bits=eight_bits)
        self._is_large = is_large(sum(value.numel() for value in policy.model.parameters()))
        self._beside = _BESIDE if self._is_large else _BESIDE_SMALL
        self._going: SingleTokens | None = None
        self._drafter: Drafter | None = None
        if speculates or (speculates is None and self._is_large):
            self._drafter = Drafter(is_small=not self._is_large)

    @torch.inference_mode()
    def step(self, rows: Sequence[Row]) -> list[Row]:
        """Read prompts beside rows that speak; append a token to each row that has been read whole.

        Returns the rows that gained a token. Those that are ahead gain the next one for nothing, before any
        goes on: so all have a part in each forward pass. Raises EngineError when the logits are not finite.
        """
        if ahead := [row for row in rows if row.ahead]:
            for row in ahead:
                row.go_on()
            return ahead
        self._take_in(rows)
        speaking = [row for row in rows if row.pending == 1]
        reading, counts = self._chunks(rows, len(speaking))
        drafts = self._drafter.drafts(speaking) if self._drafter is not None and speaking else []
        if not speaking and not reading:
            return []  # Those whom others wait for were cancelled a moment ago.
        if not drafts and not reading and self._goes_on_singly(speaking):
            speaking = self._gathered(speaking)
            append_samples(speaking, self._one_more(speaking))
            return speaking
        return self._pass(speaking, drafts, reading, counts)

    def forget(self) -> None:
        """The weights changed: the slots' contents go. Rows in flight are read again from their start."""
        self._going = None
        super().forget()

    def _chunks(self, rows: Sequence[Row], speaking: int) -> tuple[list[Row], list[int]]:
        """Rows that read in this step, and how much: those that came first, within what a step reads.

        With a small model prompts wait for company, but not for long: a pass costs it more than a token.
        """
        chosen, counts = list[Row](), list[int]()
        waiting = [row for row in rows if row.pending > 1 and not self._table.waits(row)]
        if not self._is_large and len(waiting) * 4 < speaking and self._postponed < PATIENCE:
            self._postponed += 1
            return chosen, counts
        self._postponed = 0
        left = self._beside if speaking else STEP_TOKENS
        for row in waiting:
            if left > 0:
                chosen.append(row)
                counts.append(min(row.pending, CHUNK, left))
                left -= counts[-1]
        return chosen, counts

    def _goes_on_singly(self, rows: Sequence[Row]) -> bool:
        """Whether single tokens of the rows attend in one way in all layers."""
        return self._inputs.looks_back(span_of(max(row.cached for row in rows) + 1))

    def _one_more(self, rows: list[Row]) -> torch.Tensor:
        """Logits [B, V] after the last token of each row; marks it as cached. They are in the first slots."""
        positions, going = [row.cached for row in rows], self._going
        if going is None or not going.serves(rows, positions, self._kv):
            self._kv.reserve(self._table.lengths(), span_of(max(positions) + 1))
            going = self._going = SingleTokens(self._fused, self._kv, rows)
        logits_BV = going(positions)
        for row in rows:
            row.cached += 1
        return logits_BV

    def _sharing(self, speaking: list[Row]) -> Reading | None:
        """How these read prefixes that they share, if they do; puts them in the order of their slots."""
        if len(speaking) < 2 or not self._goes_on_singly(speaking):
            return None
        speaking.sort(key=lambda row: row.slot)
        ids, cached = [row.ids for row in speaking], [row.cached for row in speaking]
        plan = plan_of(ids, cached, [row.slot for row in speaking], 2 * self._fused.key_size)
        return plan if plan.prefixes else None

    def _pass(
        self, speaking: list[Row], drafts: Sequence[list[int]], reading: list[Row], counts: list[int]
    ) -> list[Row]:
        """One forward pass of all rows; gives those that gained a token."""
        plan = None if drafts else self._sharing(speaking)
        rows = [*speaking, *reading]
        own = [*(drafts or [[]] * len(speaking)), *([[]] * len(reading))]
        counts = [*(1 + len(draft) for draft in own[: len(speaking)]), *counts]
        for row, draft in zip(rows, own, strict=True):
            row.ids += draft
        self._kv.reserve(
            self._table.lengths(), max(row.cached + count for row, count in zip(rows, counts, strict=True))
        )
        apart = 0 if plan is None else len(speaking)
        inputs, starts = ragged(rows, counts, self._inputs, self._fused.key_size, apart)
        read, grown = list[int](), list[int]()
        for index, (row, draft) in enumerate(zip(rows, own, strict=True)):
            del row.ids[len(row.ids) - len(draft) :]
            end = starts[index] + counts[index]
            if row.cached + counts[index] - len(draft) == len(row.ids):
                grown.append(index)
                read += range(end - len(draft) - 1, end)
        split = None if plan is None else partial(once, self._fused, plan, [row.cached for row in speaking])
        logits_NV = self._fused(inputs, self._kv, tensor(read), split)
        done = [rows[index] for index in grown]
        if done:
            append_samples(done, logits_NV, [own[index] for index in grown] if drafts else ())
        for row in speaking:
            # Keys and values of what was refused lie beyond, where the next tokens are written.
            row.cached += 1 + len(row.ahead)
        for row, count in zip(reading, counts[len(speaking) :], strict=True):
            row.cached += count
        return done
