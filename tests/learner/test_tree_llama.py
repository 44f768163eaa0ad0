"""Llama's decoder with fewer passes over memory, against the model's own modules."""

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.algorithms.imitation import Supervised
from etude.config.finetuning import LoraOptions
from etude.learner.tree_llama import checkpointing_layers, is_lean
from etude.models.policy import Policy
from tests.learner.gradients import Gradient, assert_same, forest, get_gradient, to_batch
from tests.models.tiny_models import change_weights, family, fresh_policy
from tests.support import one_quick

KNOWN = {
    "LlamaConfig": {"attention_bias": True},
    "MistralConfig": {"sliding_window": 6},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 8},
}


def make_policy(name: str, lora: bool, dtype: torch.dtype = torch.float32) -> Policy:
    """Norms and biases of every size, and weights that bfloat16 has too; LoRA weights that do something."""
    of = family(name, **KNOWN[name])
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in of.model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.3, generator=draw)
    of.model.to(torch.bfloat16).to(dtype)
    assert is_lean(of.model)
    if lora:
        of.use_lora(LoraOptions(r=4), seed=0)
        change_weights(of, lambda one: one.normal_(0, 0.1, generator=draw))
    return of


def flat(gradient: Gradient) -> torch.Tensor:
    """As one vector."""
    return torch.cat([gradient[name].float().flatten() for name in sorted(gradient)])


def cosine(one: Gradient, other: Gradient) -> float:
    """Of the angle between two gradients."""
    return float(torch.cosine_similarity(flat(one).double(), flat(other).double(), dim=0))


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("lora", one_quick(True, False))
def test_the_gradient_is_that_of_the_modules(monkeypatch, name, lora):
    of, batch = make_policy(name, lora), to_batch(forest(4, 12))
    lean = get_gradient(of, batch, Grpo())
    monkeypatch.setattr("etude.learner.passes.is_lean", lambda model: False)
    assert_same(lean, get_gradient(of, batch, Grpo()))


@pytest.mark.parametrize("name", one_quick(*KNOWN))
@pytest.mark.parametrize("lora", [False, True])
def test_in_bfloat16_it_is_as_near_to_that_of_float32_as_the_modules_come(monkeypatch, name, lora):
    batch, objective = to_batch(forest(4, 40)), Supervised()
    _, exact = get_gradient(make_policy(name, lora), batch, objective)
    half = make_policy(name, lora, torch.bfloat16)
    _, lean = get_gradient(half, batch, objective)
    assert cosine(lean, exact) > 0.999
    assert float((flat(lean) - flat(exact)).norm() / flat(exact).norm()) < 0.05
    monkeypatch.setattr("etude.learner.passes.is_lean", lambda model: False)
    for packing in ("tree", "padded"):
        _, usual = get_gradient(half, batch, objective, packing=packing)
        assert cosine(lean, usual) > 0.999
        assert 1 - cosine(lean, exact) <= 1.5 * (1 - cosine(usual, exact))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", one_quick(*KNOWN))
def test_layers_that_are_computed_twice_have_the_same_gradient_to_the_last_bit(name, dtype):
    of, batch = make_policy(name, lora=False, dtype=dtype), to_batch(forest(4, 12))
    _, plain = get_gradient(of, batch, Grpo())
    _, again = get_gradient(of, batch, Grpo(), gradient_checkpointing=True)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_other_models_and_layers_that_someone_stands_before_keep_their_modules():
    assert not is_lean(family("GemmaConfig", head_dim=8).model)
    of = fresh_policy()
    layer = of.model.model.layers[0]
    with checkpointing_layers(of.model):
        assert is_lean(of.model)
    usual = layer.forward
    layer.forward = lambda *args, **kwargs: usual(*args, **kwargs)
    assert not is_lean(of.model)
    with checkpointing_layers(of.model):
        assert not is_lean(of.model)
    of = fresh_policy()
    of.model.model.layers[0].register_forward_pre_hook(lambda *_: None)
    assert not is_lean(of.model)
