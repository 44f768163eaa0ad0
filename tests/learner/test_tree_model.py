"""Which models take token trees, and what happens with those that do not."""

from __future__ import annotations

import pytest

from etude.algorithms.grpo import Grpo
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.tree_model import why_not_trees
from tests.learner.gradients import assert_same, batch_of, gradient_of, train
from tests.learner.trees import forest
from tests.models.tiny_models import family, fresh_policy

OTHERS = {
    "FalconConfig": ({"alibi": True}, "does not use the attention interface"),
    "MambaConfig": ({}, "does not use the attention interface"),
    "Lfm2Config": ({"full_attn_idxs": [1]}, "not plain attention"),
    "GptOssConfig": (
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "ValueError: its attention has sinks",
    ),
}


@pytest.mark.parametrize(
    "name", ["GPT2Config", "Olmo2Config", "Qwen3MoeConfig", "CohereConfig", "Starcoder2Config"]
)
def test_most_decoders_take_trees(name):
    assert why_not_trees(family(name).model) is None


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_told_by_name_and_padded(name):
    changes, reason = OTHERS[name]
    of = family(name, **changes)
    assert reason in why_not_trees(of.model)


def test_a_model_that_does_not_take_trees_is_trained_padded_and_says_so():
    of, batch = family("FalconConfig", alibi=True), batch_of(forest(1, 30))
    learner = Learner(of, LearnerOptions(learning_rate=0.0))
    assert learner.note is None
    train(learner, batch, Grpo())
    assert "computed for each of them: this model does not use" in learner.note
    assert_same(gradient_of(of, batch, Grpo()), gradient_of(of, batch, Grpo(), packing="padded"))


def test_a_model_whose_logits_come_out_otherwise_does_not_take_trees():
    of = fresh_policy()
    head = of.model.forward

    def squared(*args, **kwargs):
        found = head(*args, **kwargs)
        found.logits = found.logits.square()
        return found

    of.model.forward = squared
    assert "are off by" in why_not_trees(of.model)
