"""Which models take token trees, and what happens with those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from etude.learner.grpo import Grpo
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.tree import token_tree
from etude.learner.tree_attention import _attend
from etude.learner.tree_layout import TreeLayout
from etude.learner.tree_model import why_not_trees
from tests.learner.gradients import assert_same, batch_of, gradient_of
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
    learner = Learner(of, LearnerOptions(learning_rate=0.0), 0)
    assert learner.note is None
    learner.train(batch, Grpo())
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


def test_a_window_that_is_not_told_to_the_attention_is_found_out():
    of = family("MistralConfig", sliding_window=6)
    of.model.config.sliding_window = None
    of.model.config.layer_types = ["sliding_attention"] * 2
    assert "not all layers" in why_not_trees(of.model)


def test_trying_a_model_leaves_it_as_it_was():
    of = fresh_policy()
    usual = of.model.config._attn_implementation
    why_not_trees(of.model)
    assert of.model.config._attn_implementation == usual


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_blocks_and_tiles_are_the_same_attention(window, softcap):
    """FlexAttention runs forwards on a CPU, which shows that its mask is right."""
    tree = token_tree([one.ids for one in forest(3, 40)])
    layout = TreeLayout.of(tree, torch.device("cpu"), np.arange(len(tree)), most=16)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, len(tree), 16, generator=draw) for heads in (4, 2, 2))

    def capped(score, *_):
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    blocks = layout.block_mask(layout.binding(window))
    theirs = flex_attention(query, key, value, score_mod=capped, block_mask=blocks, enable_gqa=True)
    ours, _ = _attend(
        fresh_policy().model.model.layers[0].self_attn,
        query,
        key,
        value,
        None,
        tree=layout,
        sliding_window=window,
        softcap=softcap,
    )
    assert torch.allclose(ours, theirs.transpose(1, 2), atol=1e-5)
    assert len(layout.all.own) > 2 and layout.all.back
