"""Token trees: nothing is lost or there twice, order plays no part, and which units go together."""

from itertools import combinations, combinations_with_replacement, pairwise
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.algorithms.grpo import Grpo
from etude.core.sample import Sample
from etude.learner import tree as trees
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.passes import PackedStep, balanced_runs, cheapest_runs, trained_units, tree_refusal
from etude.learner.team import Team
from etude.learner.tree import TreeLayout, token_tree
from tests.learner.gradients import assert_same, forest, get_gradient, to_batch, train
from tests.learner.team_process import OBJECTIVES, batch
from tests.models.tiny_models import family, fresh_policy, policy
from tests.support import draws, one_quick

# Few tokens, so that sequences begin alike.
SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


@given(SEQUENCES)
def test_the_sequences_come_back_from_the_tree_in_which_each_prefix_is_one_token(sequences):
    tree = token_tree(sequences)
    assert len(tree) == len({tuple(one[: end + 1]) for one in sequences for end in range(len(one))})
    assert sorted(np.unique(np.concatenate([*tree.paths, []]))) == list(range(len(tree)))
    assert [tree.ids[path].tolist() for path in tree.paths] == sequences
    for path in tree.paths:
        assert tree.depths[path].tolist() == list(range(len(path)))


@given(SEQUENCES, st.randoms())
def test_any_order_builds_the_same_tree(sequences, random):
    order = list(range(len(sequences)))
    random.shuffle(order)
    one, other = token_tree(sequences), token_tree([sequences[index] for index in order])
    for name in ("ids", "depths", "ends"):
        assert getattr(one, name).tolist() == getattr(other, name).tolist()
    assert [one.paths[index].tolist() for index in order] == [path.tolist() for path in other.paths]


@given(SEQUENCES.filter(any), st.data(), st.integers(1, 4), st.integers(1, 30), st.none() | st.integers(1, 3))
def test_a_query_sees_the_tokens_before_it_once_however_queries_are_cut(
    sequences, data, size, scores, window
):
    tree, found = token_tree(sequences), {}
    paths = {place: path[: depth + 1].tolist() for path in tree.paths for depth, place in enumerate(path)}
    chosen = sorted(data.draw(st.sets(st.sampled_from(sorted(paths)), min_size=1)))
    with mock.patch.multiple(trees, _QUERIES=size, _SCORES=scores):
        layout = TreeLayout.build(tree, torch.device("cpu"), np.array(chosen))
        for chunks in layout.last.chunks:
            seen_CQK = layout.mask(chunks, window)[:, 0, :, 0] == 0
            rows = chunks.query_CQ, chunks.key_CK[:, None].expand(seen_CQK.shape), seen_CQK
            for query, keys, is_seen in zip(*(each.flatten(0, 1) for each in rows), strict=True):
                found[int(query)] = keys[is_seen].tolist()
    assert [*found.items()] == [(place, paths[place][-window if window else 0 :]) for place in chosen]


OTHERS = {
    "FalconConfig": ({"alibi": True}, "attention interface"),
    "MambaConfig": ({}, "attention interface"),
    "Lfm2Config": ({"full_attn_idxs": [1]}, "not plain attention"),
    "GptOssConfig": (
        {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1},
        "attention has sinks",
    ),
}


@pytest.mark.parametrize(
    "name", one_quick("Qwen3MoeConfig", "GPT2Config", "Olmo2Config", "CohereConfig", "Starcoder2Config")
)
def test_most_decoders_take_trees(name):
    assert tree_refusal(family(name).model) is None


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_told_by_name_and_padded(name):
    changes, reason = OTHERS[name]
    assert reason in tree_refusal(family(name, **changes).model)


def test_a_model_that_does_not_take_trees_is_trained_padded_and_says_so():
    of, batch = family("FalconConfig", alibi=True), to_batch(forest(1, 12))
    learner = Learner(of, LearnerOptions(learning_rate=0.0))
    assert learner.note is None
    train(learner, batch, Grpo())
    assert "attention interface" in learner.note
    assert_same(get_gradient(of, batch, Grpo()), get_gradient(of, batch, Grpo(), packing="padded"))


def test_a_model_whose_logits_come_out_otherwise_does_not_take_trees():
    of = fresh_policy()
    head = of.model.forward

    def square(*args, **kwargs):
        found = head(*args, **kwargs)
        found.logits = found.logits.square()
        return found

    of.model.forward = square
    assert "are off by" in tree_refusal(of.model)


WORDED_SEQUENCES = st.lists(st.lists(st.integers(7, 9), min_size=2, max_size=7), min_size=1, max_size=8)


def make_units(sequences):
    ones = [(1.0,) * len(ids) for ids in sequences]
    return to_batch(
        [
            Sample(tuple(ids), (True,) * len(ids), advantages=one, logprobs=one)
            for ids, one in zip(sequences, ones, strict=True)
        ]
    )


def cost(alone, after, start, stop):
    return 0 if start == stop else alone[start] + sum(after[start + 1 : stop])


@given(WORDED_SEQUENCES, st.integers(1, 4))
def test_the_costliest_run_is_as_cheap_as_can_be(sequences, count):
    row = PackedStep(trained_units(make_units(sequences))).row()
    found = balanced_runs(row.alone, row.after, count)
    assert [index for start, stop in found for index in range(start, stop)] == list(range(len(sequences)))
    cuts = combinations_with_replacement(range(len(sequences) + 1), count - 1)
    best = min(
        max(cost(row.alone, row.after, *run) for run in pairwise([0, *cut, len(sequences)])) for cut in cuts
    )
    assert max(cost(row.alone, row.after, *run) for run in found) == best


@given(WORDED_SEQUENCES)
def test_what_a_row_costs_is_what_its_tree_has_to_compute(sequences):
    units = make_units(sequences)
    row = PackedStep(trained_units(units)).row()
    # A model reads all but the last token of a sequence.
    tree = token_tree([unit[0].ids[:-1] for unit in units])
    assert cost(row.alone, row.after, 0, len(units)) == len(tree)
    assert sorted(row.order) == list(range(len(units)))


class Pretended(Team):
    """One of several processes, for what it computes by itself."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("packing", one_quick("tree", "padded"))
@given(objective=st.sampled_from(sorted(OBJECTIVES)), seed=st.integers(0, 999), size=st.integers(2, 5))
@settings(max_examples=draws(4), deadline=None)
def test_the_parts_add_up_to_the_gradient_of_one_process(packing, objective, seed, size):
    of = policy()
    of.keep_base()
    job = batch(objective, seed, units=9)
    whole = get_gradient(of, job, OBJECTIVES[objective], packing=packing, max_grad_norm=1e9)
    loss, total = 0.0, {}
    for rank in range(size):
        options = LearnerOptions(packing=packing, token_budget=50)
        learner = Learner(of, options, Pretended(rank, size))
        metrics, _ = learner.add_gradient(job, OBJECTIVES[objective])
        loss += metrics["loss"]
        for name, parameter in of.trainable().items():
            if parameter.grad is not None:
                total[name] = total.get(name, 0.0) + parameter.grad
                parameter.grad = None
    assert_same((loss, total), whole)


@given(WORDED_SEQUENCES, st.integers(1, 20))
def test_runs_are_within_the_budget_and_no_cut_costs_less(sequences, budget):
    row = PackedStep(trained_units(make_units(sequences))).row()
    found, count = cheapest_runs(row.alone, row.after, budget), len(sequences)
    assert [index for start, stop in found for index in range(start, stop)] == list(range(count))

    def fits(runs):
        return all(
            stop - start == 1 or cost(row.alone, row.after, start, stop) <= budget for start, stop in runs
        )

    assert fits(found)
    inner = [cut for size in range(count) for cut in combinations(range(1, count), size)]
    every = [[*pairwise([0, *cut, count])] for cut in inner]
    rated = [
        (sum(cost(row.alone, row.after, *run) for run in runs), len(runs)) for runs in filter(fits, every)
    ]
    assert (sum(cost(row.alone, row.after, *run) for run in found), len(found)) == min(rated)
