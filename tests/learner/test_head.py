"""The head after chosen tokens only: the short way for plain products, against the maths as it is written."""

from __future__ import annotations

import pytest
import torch

from etude.core.call import Sampling
from etude.learner.head import Head, selective_logprobs
from etude.models.distribution import Shape
from tests.models.tiny_models import family, fresh_policy

COUNT, WIDTH, VOCABULARY = 23, 16, 330


def choices(dtype: torch.dtype):
    """Hidden states, weights and chosen tokens; logits are between -10 and 10."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(COUNT, WIDTH, generator=draw).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (COUNT,), generator=draw)


def temperatures() -> list[Shape | None]:
    """Of the model's own distributions, and of hotter and colder ones."""
    return [None, Shape(Sampling(temperature=0.5)), Shape(Sampling(temperature=1.7, max_tokens=3))] * 8


def gradient(head: Head, hidden, weight, targets, shapes, entropies):
    """Values, and the gradient of a sum of them that weighs each otherwise."""
    made = selective_logprobs(head, hidden, targets, shapes, VOCABULARY, entropies=entropies)
    weights = torch.linspace(-1, 2, made.numel()).view(made.shape)
    return made, *torch.autograd.grad((made * weights).sum(), (hidden, weight))


@pytest.mark.parametrize("entropies", [False, True])
@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("held", [1 << 27, 5 * VOCABULARY * 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_short_way_gives_the_same(monkeypatch, dtype, held, warm, entropies):
    monkeypatch.setattr("etude.learner.head._HELD", held)
    monkeypatch.setattr("etude.learner.head._IN_CACHE", 3 * VOCABULARY)
    hidden, weight, targets = choices(dtype)
    shapes = temperatures()[:COUNT] if warm else [None] * COUNT
    short = Head(lambda hidden: hidden @ weight.t(), weight)
    made = gradient(short, hidden, weight, targets, shapes, entropies)
    exact = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    plain = Head(lambda hidden: hidden @ exact[1].t())
    wanted = gradient(plain, exact[0], exact[1], targets, shapes, entropies)
    for one, other in zip(made, wanted, strict=True):
        error = float((one - other).detach().abs().max() / other.detach().abs().max())
        assert error < (1e-5 if dtype == torch.float32 else 4e-2)


def test_only_heads_that_are_a_plain_product_go_the_short_way():
    of = fresh_policy()
    module = of.model.get_output_embeddings()
    assert Head.of(of.model).weight_VD is module.weight
    module.register_forward_hook(lambda *_: None)
    assert Head.of(of.model).weight_VD is None
    for name in ("CohereConfig", "GraniteConfig", "Gemma2Config"):
        changes = {"logits_scaling": 2.0} if name == "GraniteConfig" else {}
        assert Head.of(family(name, **changes).model).weight_VD is None, name
