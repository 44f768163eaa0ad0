"""Logprobs of a prompt's tokens, for whoever wants to know how likely a text is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from etude.inference.engine import TopLogprobs
from etude.models.architecture import logits_after
from etude.models.policy import Policy

_LOGITS = 1 << 27
"""Logits that are held at a time: half a gigabyte in float32. Each part of a prompt reads all before it."""


@torch.inference_mode()
def prompt_scores(
    policy: Policy, ids: Sequence[int], top: int
) -> tuple[tuple[float, ...], tuple[TopLogprobs, ...]]:
    """The logprobs of all tokens but the first under the model itself, and the likeliest in their places."""
    ids_1T = torch.tensor([ids], device=policy.device)
    logprobs: list[float] = []
    likeliest: list[TopLogprobs] = []
    positions = torch.arange(len(ids) - 1, device=policy.device)
    for part in torch.split(positions, max(_LOGITS // policy.speech.vocabulary, 1)):
        logprobs_KV = logits_after(policy.model, ids_1T, part)[0].float().log_softmax(dim=-1)
        logprobs += logprobs_KV.gather(1, ids_1T[0, part + 1, None])[:, 0].tolist()
        best_KN, tokens_KN = logprobs_KV.topk(min(top, logprobs_KV.shape[1]))
        rows = zip(tokens_KN.tolist(), best_KN.tolist(), strict=True)
        likeliest += [tuple(zip(*row, strict=True)) for row in rows]
    return tuple(logprobs), tuple(likeliest)
