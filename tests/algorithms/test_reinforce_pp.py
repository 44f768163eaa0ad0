"""REINFORCE++: advantages over the whole batch, by hand."""

from __future__ import annotations

import math

import pytest

from etude.algorithms.grpo import ReinforcePP
from etude.core.errors import RequestError
from tests.algorithms.test_grpo import sample


def advantages(algorithm, *groups):
    return [unit[0].advantages for unit in algorithm.units(groups)[0]]


def test_advantages_are_normalised_over_all_tokens_of_the_batch():
    # Rewards 1 (three tokens) and 0 (one token): mean 3/4, deviation sqrt(3)/4.
    found = advantages(ReinforcePP(), [sample(1.0, 3)], [sample(0.0, 1)])
    assert found[0] == pytest.approx((0, *[1 / math.sqrt(3)] * 3))
    assert found[1] == pytest.approx((0, -math.sqrt(3)))


def test_groups_are_not_compared_with_each_other_where_there_is_a_baseline():
    easy, hard = [sample(1.0, 1), sample(0.9, 1)], [sample(0.1, 1), sample(0.0, 1)]
    plain = advantages(ReinforcePP(), easy, hard)
    based = advantages(ReinforcePP(baseline=True), easy, hard)
    assert plain[1][1] > 0 > plain[2][1]
    assert [values[1] for values in based] == pytest.approx([1.0, -1.0, 1.0, -1.0])


def test_a_batch_of_equal_rewards_has_no_advantage():
    assert advantages(ReinforcePP(), [sample(0.3, 1), sample(0.1 + 0.2, 2)]) == [(0, 0), (0, 0, 0)]


def test_the_price_of_leaving_the_base_model_is_paid_before():
    algorithm = ReinforcePP(reward_kl=0.5)
    units, metrics = algorithm.units([[sample(1.0, 1), sample(1.0, 1)]], lambda samples: [[0.0], [2.0]])
    assert [unit[0].advantages[1] for unit in units] == pytest.approx([1.0, -1.0])
    assert metrics["kl_in_reward"] == 1.0


def test_advantages_that_samples_came_with_are_kept():
    group = [sample(1.0, 1, advantages=(0.0, 5.0)), sample(0.0, 1, advantages=(0.0, -3.0))]
    assert advantages(ReinforcePP(), group) == [(0, 5), (0, -3)]


def test_one_episode_of_an_example_is_enough_without_a_baseline():
    ReinforcePP(num_generations=1).check()
    with pytest.raises(RequestError, match="reinforce_pp would learn nothing"):
        ReinforcePP(num_generations=1, baseline=True).check()
