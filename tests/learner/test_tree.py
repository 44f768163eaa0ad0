"""Token trees: nothing is lost, nothing is there twice, and order plays no part."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.learner.tree import token_tree

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
