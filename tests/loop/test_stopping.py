import pytest

from etude.loop.metrics import reason_to_stop, scores_of
from tests.report.histories import history


def test_validations_count_where_there_are_any_and_epochs_otherwise():
    assert scores_of(history([0.1, 0.2], {0: 0.5})) == [0.5]
    assert scores_of(history([0.1, None, 0.2])) == [0.1, 0.2]


@pytest.mark.parametrize(
    ("rewards", "patience", "stops"),
    [
        ([0.5, 0.4], 2, False),
        ([0.5, 0.4, 0.4], 2, True),
        ([0.5, 0.4, 0.6], 2, False),
        ([0.5, 0.6, 0.55, 0.6], 2, True),
        ([0.5, 0.5], 1, True),
        ([0.5, 0.4, 0.3], None, False),
        ([], 1, False),
    ],
)
def test_patience_ends_when_the_last_rewards_have_not_beaten_the_best(rewards, patience, stops):
    assert (reason_to_stop(history(rewards), patience, None) is not None) == stops


@pytest.mark.parametrize(("reward", "stops"), [(0.89, False), (0.9, True), (None, False)])
def test_the_target_ends_when_the_last_reward_reaches_it(reward, stops):
    assert (reason_to_stop(history([0.2], {0: 0.2, 1: reward}), None, 0.9) is not None) == stops


def test_a_resumed_run_looks_only_at_what_was_known_then():
    past = history([0.1, 0.2, 0.3], {0: 0.1, 1: 0.9, 2: 0.2, 3: 0.2}).until(2)
    assert scores_of(past) == [0.1, 0.9, 0.2]
    assert [entry.epoch for entry in past.epochs] == [1, 2]
