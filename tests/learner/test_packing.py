"""Packs: every unit once, within the budget, and shared tokens seldom twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.learner.packing import packs
from etude.learner.tree import token_tree

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=2, max_size=12)


def packed(units, token_budget):
    """The packs of units of sequences, and for each how many tokens its tree has."""
    tree = token_tree([sequence for unit in units for sequence in unit])
    paths = iter(tree.paths)
    found = packs(tree, [[next(paths) for _ in unit] for unit in units], token_budget)
    return found, [len(token_tree([one for index in pack for one in units[index]])) for pack in found]


@given(SEQUENCES, st.integers(1, 20), st.integers(1, 2))
def test_every_unit_is_in_one_pack_and_packs_are_within_the_budget(sequences, token_budget, size):
    units = [sequences[at : at + size] for at in range(0, len(sequences) - size + 1, size)]
    found, sizes = packed(units, token_budget)
    assert sorted(np.concatenate(found)) == list(range(len(units)))
    for pack, tokens in zip(found, sizes, strict=True):
        assert tokens <= max(token_budget, *(packed([units[index]], 10**6)[1][0] for index in pack))


@given(SEQUENCES, st.integers(1, 20))
def test_two_packs_are_never_made_where_one_has_room_for_both(sequences, token_budget):
    units = [[one] for one in sequences]
    found, _ = packed(units, token_budget)
    for pack in found:
        for other in found:
            _, (together,) = packed([units[index] for index in {*pack, *other}], 10**6)
            assert pack == other or together > token_budget


def test_a_tree_that_is_too_large_is_cut_where_its_prompt_is_repeated_least():
    system = (1, 2, 3, 4)
    units = [[(*system, question, answer)] for question in (7, 8) for answer in range(3)]
    found, sizes = packed(units, 9)
    assert found == [[0, 1, 2], [3, 4, 5]]
    assert sizes == [8, 8]
