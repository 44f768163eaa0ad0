"""Llama's decoder with fewer passes over memory, against the model's own modules."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.learner.checkpointing import checkpointed
from etude.learner.tree_model import is_lean
from etude.models.policy import LoraOptions
from tests.learner.gradients import assert_same, batch_of, gradient_of
from tests.learner.trees import forest
from tests.models.tiny_models import family, fresh_policy

KNOWN = {
    "LlamaConfig": {"attention_bias": True},
    "MistralConfig": {"sliding_window": 6},
    "Qwen2Config": {},
    "Qwen3Config": {"head_dim": 8},
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("lora", [False, True])
def test_the_gradient_is_that_of_the_modules(monkeypatch, name, lora):
    of, batch = family(name, **KNOWN[name]), batch_of(forest(4, 40))
    assert is_lean(of.model)
    with torch.no_grad():
        for parameter in of.model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1, 0.3, generator=torch.Generator().manual_seed(0))
    if lora:
        of.use_lora(LoraOptions(r=4), seed=0)
    lean = gradient_of(of, batch, Grpo())
    monkeypatch.setattr("etude.learner.tree_model.is_lean", lambda model: False)
    assert_same(lean, gradient_of(of, batch, Grpo()))


def test_other_models_and_layers_that_someone_stands_before_keep_their_modules():
    assert not is_lean(family("GemmaConfig", head_dim=8).model)
    of = fresh_policy()
    with checkpointed(of.model):
        assert not is_lean(of.model)
    assert is_lean(of.model)
    of.model.model.layers[0].register_forward_pre_hook(lambda *_: None)
    assert not is_lean(of.model)
