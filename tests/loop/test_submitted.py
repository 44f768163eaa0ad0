"""The run keeps a record of the data that backends were handed, and knows where to go back to."""

from __future__ import annotations

import logging

import pytest

from etude.backends.capabilities import Capabilities
from etude.core.conversion import TrajectoryCollection
from etude.core.history import History
from etude.core.job import TrainingJobRef
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory
from etude.loop.lifecycle import RecoveryPoint, recovery_point
from etude.loop.training_data import record_samples
from etude.store.learned import Source, read_learned
from tests.show.histories import history, version
from tests.training import FakeAdapter

JOB = TrainingJobRef(run_id="r-epoch-1", backend="fake")


def said(text, ids):
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT,
        content=text,
        token_ids=ids,
        context_ids=None if ids is None else (1, 2),
        logprobs=() if ids is None else (-1.0,) * len(ids),
    )


def collection(method, *rows, **fields):
    return TrajectoryCollection(trajectories=[list(rows)], run_id="r-epoch-1", method=method, **fields)


def episode(number, reward, ids=(3, 4)):
    items = [EpisodeItem(role=EpisodeItemRole.USER, content="two?"), said("four", ids)]
    return Trajectory(episode=items, reward=reward, episode_id=f"train/1/a/{number}")


async def test_rewards_are_shown_with_the_advantages_that_the_runs_algorithm_has(tmp_path):
    given = collection("grpo", episode(0, 1.0), episode(1, 0.0))
    adapter = FakeAdapter(tmp_path / "jobs")
    await record_samples(tmp_path, None, adapter, 1, given, JOB)
    (best,) = read_learned(tmp_path, "train/1/a/0", epoch=1)
    (worst,) = read_learned(tmp_path, "train/1/a/1", epoch=1)
    assert best.source == Source("r-epoch-1", backend="fake", makes_advantages=True)
    assert best.weights == (0, 0, 1, 1) and best.advantages[2] > 0 > worst.advantages[2]


async def test_what_has_no_token_ids_is_not_in_it(tmp_path):
    adapter = FakeAdapter(tmp_path / "jobs")
    await record_samples(tmp_path, "policy", adapter, 1, collection("grpo", episode(0, 1.0, ids=None)), JOB)
    assert read_learned(tmp_path, "train/1/a/0") == []


async def test_training_goes_on_without_a_record(tmp_path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "submitted").write_text("in the way")
    adapter = FakeAdapter(tmp_path / "jobs")
    with caplog.at_level(logging.WARNING):
        await record_samples(tmp_path, None, adapter, 1, collection("grpo", episode(0, 1.0)), JOB)
    assert "is not recorded" in caplog.text


async def test_a_backend_that_keeps_a_record_itself_gets_no_second_one(tmp_path):
    adapter = FakeAdapter(tmp_path / "jobs", capabilities=Capabilities(records_samples=True))
    await record_samples(tmp_path, None, adapter, 1, collection("grpo", episode(0, 1.0)), JOB)
    assert not (tmp_path / "submitted").exists()


async def test_whether_the_last_version_is_whole_is_asked_of_the_last_epoch_alone(monkeypatch):
    asked, looked_at = [], []
    went_back = History.went_back
    monkeypatch.setattr(
        History, "went_back", lambda self, epoch: looked_at.append(epoch) or went_back(self, epoch)
    )

    async def find_damage(version):
        asked.append(version.number)
        return []

    assert await recovery_point(history([0.5] * 300), [], find_damage) is None
    assert asked == looked_at == [300]


async def test_it_goes_back_to_the_last_version_that_is_whole():
    whole = history([0.1, 0.2, 0.3, 0.4])
    after = whole.epochs[2].model_copy(update={"back_to": version(1)})

    async def find_damage(version):
        return [f"v{version.number} is missing"] if version.number > 2 else []

    lost = ("v3 is missing", "v4 is missing")
    assert await recovery_point(whole, [], find_damage) == RecoveryPoint(
        lost, 2, version(2), keeps_warm_up=True
    )
    went_back = await recovery_point(whole.with_entry(after), [], find_damage)
    assert went_back == RecoveryPoint(("v4 is missing",), 3, version(1), keeps_warm_up=True)
