"""Token trees: nothing is lost, nothing is there twice, and order plays no part."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.grpo import Grpo
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.packed import why_not_trees
from etude.learner.tree import token_tree
from tests.learner.gradients import assert_same, batch_of, gradient_of, train
from tests.learner.trees import forest
from tests.models.tiny_models import family, fresh_policy

# Few tokens, so that sequences begin alike.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


@given(SEQUENCES)
def test_the_sequences_come_back_from_the_tree(sequences):
    tree = token_tree(sequences)
    assert [tree.ids[path].tolist() for path in tree.paths] == sequences
    for path in tree.paths:
        assert tree.depths[path].tolist() == list(range(len(path)))


@given(SEQUENCES)
def test_each_prefix_is_one_token(sequences):
    prefixes = {tuple(one[: end + 1]) for one in sequences for end in range(len(one))}
    tree = token_tree(sequences)
    assert len(tree) == len(prefixes)
    assert sorted(np.unique(np.concatenate([*tree.paths, []]))) == list(range(len(tree)))


@given(SEQUENCES, st.randoms())
def test_any_order_builds_the_same_tree(sequences, random):
    order = list(range(len(sequences)))
    random.shuffle(order)
    one, other = token_tree(sequences), token_tree([sequences[index] for index in order])
    for name in ("ids", "depths", "ends"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    assert [one.paths[index].tolist() for index in order] == [path.tolist() for path in other.paths]


@given(SEQUENCES)
def test_what_comes_before_a_token_is_told_by_where_subtrees_end(sequences):
    tree = token_tree(sequences)
    for path in tree.paths:
        for depth, place in enumerate(path):
            before = [k for k in range(len(tree)) if k <= place < tree.ends[k]]
            assert before == path[: depth + 1].tolist()


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
