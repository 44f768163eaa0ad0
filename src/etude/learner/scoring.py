"""Scoring: the logprobs of samples' tokens under a policy, without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from etude.core.sample import Sample
from etude.learner.head import has_plain_head
from etude.learner.objective import Unit
from etude.learner.padding import padded_passes
from etude.models.policy import Policy


def logprobs_of(policy: Policy, samples: Sequence[Sample], token_budget: int = 16384) -> list[list[float]]:
    """For each sample its tokens' logprobs [T] at the temperatures that they were sampled at; 0 where the
    mask is False."""
    units: list[Unit] = [(replace(sample, weights=None, advantages=None),) for sample in samples]
    logprobs = [[0.0] * len(sample.ids) for sample in samples]
    with policy.lock, torch.no_grad():
        plain = has_plain_head(policy.model)
        factors = [[1.0]] * len(units)
        for chunk in padded_passes(units, factors, (1.0, 1.0), token_budget, policy.device, plain):
            logprobs_BT = chunk.logprobs(policy.model)
            for row, values_T in zip(chunk.rows, logprobs_BT.tolist(), strict=True):
                logprobs[row] = [
                    value if sampled else 0.0
                    for value, sampled in zip(values_T, samples[row].mask, strict=False)
                ]
    return logprobs
