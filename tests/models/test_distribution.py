"""Truncation keeps the tokens that its definition names, few or many."""

from __future__ import annotations

import pytest
import torch

from etude.core.call import Sampling
from etude.models.distribution import Shape, shaped


def kept(logits, sampling):
    """The ids of the tokens that can be drawn."""
    (row,) = shaped(torch.tensor([logits]), [Shape(sampling)])
    return row.isfinite().nonzero().flatten().tolist()


def by_hand(logits, sampling):
    probs = torch.softmax(torch.tensor(logits), 0).tolist()
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    order = [token for token in order if probs[token] >= sampling.min_p * probs[order[0]]]
    order = order[: sampling.top_k or None]
    total, mass, nucleus = sum(probs[token] for token in order), 0.0, []
    for token in order:
        if sampling.top_p < 1 and mass >= sampling.top_p * total:
            break
        nucleus.append(token)
        mass += probs[token]
    return sorted(nucleus)


@pytest.mark.parametrize("spread", [0.05, 3.0])
@pytest.mark.parametrize(
    "changes",
    [
        {"top_p": 0.9},
        {"top_k": 5},
        {"top_k": 3000},
        {"min_p": 0.1},
        {"top_p": 0.5, "top_k": 2000, "min_p": 0.001},
        {"top_p": 0.3, "min_p": 0.2},
    ],
)
def test_truncation_among_few_and_many_likely_tokens(changes, spread):
    torch.manual_seed(0)
    logits = (torch.randn(5000) * spread).tolist()
    mine, theirs = kept(logits, Sampling(**changes)), by_hand(logits, Sampling(**changes))
    # The last token of thousands may be on either side of a sum in float32.
    assert len(set(mine) ^ set(theirs)) <= (1 if len(theirs) > 1000 else 0)


def test_of_equal_tokens_the_first_stay():
    assert kept([0.0] * 2000, Sampling(top_k=3)) == [0, 1, 2]
    assert kept([0.0] * 1500 + [1.0], Sampling(top_k=3)) == [0, 1, 1500]
    assert kept([0.0] * 4, Sampling(top_p=0.5)) == [0, 1]


def test_rows_without_a_shape_stay_as_they_are():
    logits = torch.randn(3, 40)
    made = shaped(logits, [None, Shape(Sampling(temperature=0.5, top_k=2)), None])
    assert torch.equal(made[[0, 2]], logits[[0, 2]])
    assert int(made[1].isfinite().sum()) == 2
