from etude.core.history import History
from etude.store.figures import best_version, last_version, versions_to_keep
from tests.report.histories import epoch, history


def numbers(versions):
    return [one.number for one in versions]


def test_the_best_versions_by_validation_and_the_last_one_are_kept():
    past = history([0.0] * 4, {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.8, 4: 0.2})
    assert numbers(versions_to_keep(past, 1)) == [1, 4]
    assert numbers(versions_to_keep(past, 2)) == [1, 3, 4]


def test_without_validation_the_rewards_of_the_episodes_sampled_from_a_version_count():
    assert numbers(versions_to_keep(history([0.1, 0.9, 0.2]), 1)) == [1, 3]


def test_a_version_that_was_measured_twice_is_one_version():
    past = History(run_id="run", epochs=(epoch(0, 0.5, skipped="flat"), epoch(0, 0.6)))
    assert numbers(versions_to_keep(past, 5)) == [0, 1]


def test_the_best_version_has_the_highest_validation_reward_and_the_latest_wins_ties():
    assert best_version(history([0.0] * 3, {0: 0.1, 1: 0.9, 2: 0.9, 3: 0.2})).number == 2


def test_what_was_not_measured_after_training_is_not_called_best():
    assert best_version(history([0.9, 0.1])) is None
    assert best_version(history([0.9, 0.1], {0: 0.5})) is None


def test_nothing_trained_has_no_versions():
    assert best_version(history([])) is None
    assert last_version(history([])) is None
    assert versions_to_keep(history([]), 3) == []
