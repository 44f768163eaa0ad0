"""Gradient checkpointing: the same gradient, with every layer computed twice."""

from __future__ import annotations

import pytest
import torch

from etude.algorithms.grpo import Grpo
from etude.core.errors import RequestError
from etude.learner.learner import Learner, LearnerOptions
from etude.models.policy import LoraOptions
from tests.learner.gradients import assert_same, batch_of, gradient_of
from tests.learner.trees import forest
from tests.models.tiny_models import family, fresh_policy

GEMMA = {"head_dim": 8, "sliding_window": 6}


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "lora"])
def test_the_gradient_is_the_same(packing, kind):
    of = family("Gemma2Config", **GEMMA) if kind == "gemma2" else fresh_policy()
    if kind == "lora":
        of.use_lora(LoraOptions(r=4), seed=0)
        with torch.no_grad():
            for parameter in of.trainable().values():
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(0))
    batch, objective = batch_of(forest(1, 30)), Grpo(entropy_bonus=0.1)
    plain = gradient_of(of, batch, objective, packing=packing)
    again = gradient_of(of, batch, objective, packing=packing, gradient_checkpointing=True)
    assert_same(again, plain)


def test_a_model_that_does_not_say_what_its_layers_are_is_refused():
    of = fresh_policy()
    of.model.model.layers = torch.nn.ModuleList()
    with pytest.raises(RequestError, match="gradient_checkpointing: models of the type 'llama' do not say"):
        Learner(of, LearnerOptions(gradient_checkpointing=True))
