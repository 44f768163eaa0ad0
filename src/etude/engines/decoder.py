"""Decoders: each step runs the model on rows of token ids, and samples one more token for each."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TypeAlias

import torch

from etude.engines.fused_llama import FusedLlama
from etude.engines.graph_decoder import GraphDecoder
from etude.engines.sampler import LiveRow, append_samples
from etude.engines.slot_decoder import CHUNK, MOST_ROWS, PATIENCE, STEP_TOKENS, SlotDecoder, fuses
from etude.engines.step_inputs import Prefix, make_ragged_inputs, shared_prefixes, tensor
from etude.models.architecture import logits_after, takes_key_value_slots
from etude.models.device import is_large
from etude.models.policy import Policy

_LOG = logging.getLogger("etude.engine")
_BESIDE, _BESIDE_SMALL = 256, 1024
"""Maximum number of prompt tokens in a step while other rows generate, because these wait for the step. For a
small model, a pass costs more than its tokens."""


def make_decoder(policy: Policy, *, slots: int, deterministic: bool) -> Decoder:
    """Return the fastest decoder that is correct for the policy's architecture."""
    if deterministic and policy.device.type == "cpu":
        # With more threads, the order of additions would depend on the machine's load.
        torch.set_num_threads(1)
    if not takes_key_value_slots(policy.model):
        return RecomputeDecoder(policy, deterministic=deterministic)
    if deterministic or not fuses(policy):
        return SlotDecoder(policy, slots=slots, deterministic=deterministic)
    if policy.device.type != "cuda":
        return RaggedDecoder(policy, slots=slots)
    with torch.inference_mode():
        decoder = GraphDecoder(policy)
        reason = decoder.why_wrong()
    if reason is None:
        return decoder
    _LOG.warning("tokens are sampled by the model's own modules, more slowly: %s", reason)
    return SlotDecoder(policy, slots=slots, deterministic=False)


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
                counts.append(min(row.pending, CHUNK, left))
                left -= counts[-1]
        return chosen, counts


Decoder: TypeAlias = SlotDecoder | RaggedDecoder | GraphDecoder | RecomputeDecoder
