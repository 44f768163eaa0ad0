"""How likely the tokens of a job's samples were before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch

from etude.core.sample import Sample
from etude.learner.objective import Pass


class JobStart:
    """The logprobs that the clipped ratios of a job of several steps are to."""

    def __init__(self, samples: Sequence[Sample], logprobs: Sequence[Sequence[float]]) -> None:
        """`logprobs` are those of each sample's trained tokens, in their order."""
        self._samples = samples  # The ids of samples hold while these are alive.
        self._logprobs = {id(sample): own for sample, own in zip(samples, logprobs, strict=True)}

    def put_into(self, chunk: Pass, samples: Sequence[Sample]) -> Pass:
        """The pass with `start_BT`; its rows are numbers of `samples`."""
        weights_BT = chunk.micro.weights_BT
        trained_BT = weights_BT.cpu() != 0
        values = [*chain.from_iterable(self._logprobs[id(samples[row])] for row in chunk.rows)]
        start_BT = torch.zeros(trained_BT.shape).masked_scatter(trained_BT, torch.tensor(values))
        return replace(chunk, micro=replace(chunk.micro, start_BT=start_BT.to(weights_BT.device)))
