"""How old what is trained on may be."""

from __future__ import annotations

import pytest

from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from etude.loop.training_data import age_of, without_stale

MADE = [1, 2, 3, 4, 5]


def sampled_from(*versions):
    items = [
        EpisodeItem(
            role=EpisodeItemRole.ASSISTANT,
            content=str(version),
            logprobs=[],
            model_version=version,
        )
        for version in versions
    ]
    given = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=[], given=True)
    return Trajectory(episode=[given, *items], reward=0.0)


def collection(*groups):
    return TrajectoryCollection(trajectories=[list(group) for group in groups], run_id="job")


def kept(found):
    return [
        [[int(item.content) for item in one.episode[1:]] for one in group] for group in found.trajectories
    ]


@pytest.mark.parametrize(
    ("bound", "expected", "dropped"),
    [
        (0, [[[5, 5]]], 4),
        (1, [[[5, 5], [4]], [[5, 4]]], 2),
        (2, [[[5, 5], [4]], [[3], [5, 4]]], 1),
        (9, [[[5, 5], [4]], [[3], [5, 4], [2, 5]]], 0),
    ],
)
def test_a_trajectory_is_as_old_as_its_oldest_answer(bound, expected, dropped):
    all_of_it = collection(
        [sampled_from(5, 5), sampled_from(4)], [sampled_from(3), sampled_from(5, 4), sampled_from(2, 5)]
    )
    found, count = without_stale(all_of_it, MADE, bound)
    assert (kept(found), count) == (expected, dropped)


def test_an_answer_of_an_unknown_version_is_too_old():
    found, count = without_stale(collection([sampled_from(5), sampled_from(5, None)]), MADE, 100)
    assert (kept(found), count) == ([[[5]]], 1)


def test_nothing_may_be_left():
    found, count = without_stale(collection([sampled_from(1), sampled_from(2)]), MADE, 2)
    assert (len(found), count) == (0, 2)


def test_age_is_counted_in_versions_that_were_made_whatever_their_numbers():
    assert [age_of(number, [3, 10, 12]) for number in (0, 3, 5, 10, 12)] == [3, 2, 2, 1, 0]
