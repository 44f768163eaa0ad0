"""Golden tables of the curriculum."""

import json

import pytest
from pydantic import ValidationError

from etude.config.finetuning import CurriculumLearningConfig
from etude.core.sample import GroupFigures
from etude.loop.curriculum import apply_curriculum, initial_state


def config(**keys):
    return CurriculumLearningConfig(enabled=True, **keys)


def apply(made, seed=0, epoch=0, **keys):
    """The groups, state and figures of the first epoch with a curriculum of these keys."""
    settings = config(**keys)
    return apply_curriculum(made, initial_state(settings), settings, seed, epoch)


def group(*rewards, example="a"):
    return GroupFigures(example, len(rewards), rewards, ())


def groups(*averages, spread=0.4):
    """Groups of two episodes around each average; the id is the place."""
    return [
        group(average - spread / 2, average + spread / 2, example=str(place))
        for place, average in enumerate(averages)
    ]


@pytest.mark.parametrize(
    "keys", [{"min_reward_diff": -1}, {"random_subsample": 5.0}, {"random_subsample": 0}]
)
def test_numbers_that_mean_nothing_are_refused(keys):
    with pytest.raises(ValidationError):
        config(**keys)


def test_disabled_it_selects_everything():
    settings = CurriculumLearningConfig()
    found, state, facts = apply_curriculum(groups(0.1, 0.9), initial_state(settings), settings, 0, 0)
    assert found == {0: range(2), 1: range(2)}
    assert state == initial_state(settings)
    assert facts == {"curriculum_percentile": 1.0}


def test_the_easiest_groups_come_first_and_the_hardest_when_asked():
    found, state, _ = apply(groups(0.2, 0.8, 0.5, 0.4), initial_percentile=0.5)
    assert [*found] == [1, 2]
    assert (state["total_groups"], state["included_groups"]) == (4, ["1", "2"])
    found, _, _ = apply(groups(0.2, 0.8, 0.5, 0.4), initial_percentile=0.5, sort_ascending=True)
    assert [*found] == [0, 3]


def test_each_percentile_trains_for_the_expansion_interval():
    settings, seen = config(), []
    state = initial_state(settings)
    for epoch in range(21):
        _, state, facts = apply_curriculum(groups(0.5, 0.4, 0.3), state, settings, 0, epoch)
        state = json.loads(json.dumps(state))
        seen.append(facts["curriculum_percentile"])
    assert seen == [0.3] * 5 + [0.5] * 5 + [0.7] * 5 + [0.9] * 5 + [1.0]


def test_an_epoch_that_selects_nothing_does_not_count_as_trained():
    settings = config(initial_percentile=0.4, increment_percentile=0.4, expansion_interval=1)
    state = initial_state(settings)
    found, state, facts = apply_curriculum(groups(0.5, 0.4, spread=0.0), state, settings, 0, 0)
    assert (found, facts["curriculum_flat_groups"]) == ({}, 2)
    _, state, facts = apply_curriculum(groups(0.5, 0.4), state, settings, 0, 1)
    assert facts["curriculum_percentile"] == 0.4
    _, state, facts = apply_curriculum(groups(0.5, 0.4), state, settings, 0, 2)
    assert (facts["curriculum_percentile"], state["last_expansion_epoch"]) == (0.8, 2)


def test_groups_whose_rewards_hardly_differ_are_left_out_and_the_exact_difference_is_kept():
    near, exact, wide = group(0.1, 0.25), group(0.1, 0.3), group(0.0, 1.0)
    found, _, facts = apply([near, exact, wide], initial_percentile=1.0, min_reward_diff=0.2)
    assert [*found] == [2, 1]
    assert facts["curriculum_flat_groups"] == 1


@pytest.mark.parametrize(
    ("count", "percentile", "expected"), [(10, 0.3, 3), (3, 0.3, 1), (7, 0.5, 4), (1, 0.3, 1), (10, 1.0, 10)]
)
def test_the_share_is_rounded_up_without_float_noise(count, percentile, expected):
    found, _, _ = apply(groups(*[n / 100 for n in range(count)]), initial_percentile=percentile)
    assert len(found) == expected


def test_a_random_subsample_is_a_share_of_the_valid_groups_and_repeats_by_seed_and_epoch():
    many = groups(*[n / 100 for n in range(20)])

    def draw(seed, epoch):
        return [*apply(many, seed, epoch, initial_percentile=1.0, random_subsample=0.5)[0]]

    assert len(draw(0, 0)) == 10
    assert draw(0, 0) == draw(0, 0)
    assert draw(0, 0) != draw(1, 0)
    assert draw(0, 0) != draw(0, 1)


def test_a_single_group_is_only_subsampled_by_trajectory_and_the_state_stays():
    one = group(*[n / 10 for n in range(10)])
    found, state, _ = apply([group(), one], random_subsample=0.5)
    assert ([*found], len(found[1])) == ([1], 5)
    assert state == initial_state(config(random_subsample=0.5))
    assert apply([one])[0] == {0: range(10)}
