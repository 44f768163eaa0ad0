"""The bound on how old the weights may be that sampled what is trained on."""

from __future__ import annotations

import pytest

from etude.core.errors import TrainingError
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection
from etude.learner.staleness import without_stale


def sampled_from(*versions):
    items = [
        EpisodeItem(
            role=EpisodeItemRole.ASSISTANT,
            content=str(version),
            logprobs=[],
            metadata={} if version is None else {"model_version": version},
        )
        for version in versions
    ]
    given = EpisodeItem(role=EpisodeItemRole.ASSISTANT, content="", logprobs=[], metadata={"given": True})
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
    found, count = without_stale(all_of_it, 5, bound)
    assert (kept(found), count) == (expected, dropped)


def test_an_answer_of_an_unknown_version_is_too_old():
    found, count = without_stale(collection([sampled_from(5), sampled_from(5, None)]), 5, 100)
    assert (kept(found), count) == ([[[5]]], 1)


@pytest.mark.parametrize(
    ("versions", "told"), [((1, 2), "were at least 3 updates ago"), ((None,), "do not say")]
)
def test_nothing_left_is_an_error(versions, told):
    with pytest.raises(TrainingError, match=rf"all {len(versions)} trajectories are too old.*{told}"):
        without_stale(collection([sampled_from(version) for version in versions]), 5, 2)
