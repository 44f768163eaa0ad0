"""A name stands for one job, in any process; and a version is whole whenever its writer is killed."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from pydantic_core import PydanticSerializationError

from etude.backends.openai_jobs import OpenAiAdapter, OpenAiAdapterConfig
from etude.backends.state_folders import JobNameTakenError, StateFolders
from etude.config.finetuning import FinetuneConfig
from etude.core.sample import Sample, TrajectoryCollection
from etude.learner.learner import Learner, LearnerOptions
from etude.store.files import delete_left_over, write_atomically
from tests.backends.openai_stand_in import BASE, StandIn
from tests.backends.test_local_adapter import adapter_on, collection, finish
from tests.backends.test_openai_jobs import backend, dpo, imitations
from tests.file_operations import each_operation, killed_at
from tests.models.tiny_models import fresh_policy
from tests.support import one_quick


def at_openai(server, seed=0, **settings):
    adapter = backend(server, **settings)
    adapter.run_config = FinetuneConfig(seed=seed)
    return adapter


@pytest.mark.parametrize(
    ("settings", "data", "difference"),
    [
        ({}, imitations("name", rows=11), "other data"),
        ({}, dpo("name"), "another method"),
        ({"hyperparameters": {"n_epochs": 3}}, imitations("name"), "other hyperparameters"),
        ({"seed": 8}, imitations("name"), "other hyperparameters"),
        ({"model": f"{BASE}-other"}, imitations("name"), "another start model"),
    ],
)
async def test_at_an_api(settings, data, difference):
    server = StandIn()
    first = await at_openai(server).submit(imitations("name"))
    assert await at_openai(server).submit(imitations("name")) == first
    with pytest.raises(JobNameTakenError, match=difference):
        await at_openai(server, **settings).submit(data)
    assert len(server.jobs) == len(server.files) == 1


async def test_jobs_of_two_runs_that_are_called_alike_are_two():
    server = StandIn()
    runs = {key: OpenAiAdapter(OpenAiAdapterConfig(), server.client(), BASE, run_key=key) for key in "ab"}
    refs = [await runs["a"].submit(imitations("r-epoch-1")), await runs["b"].submit(dpo("r-epoch-1"))]
    again = OpenAiAdapter(OpenAiAdapterConfig(), server.client(), BASE, run_key="a")
    assert await again.submit(imitations("r-epoch-1")) == refs[0] != refs[1]
    # And neither is the job of that name of somebody who is no run.
    await at_openai(server).submit(dpo("r-epoch-1"))
    assert len(server.jobs) == 3


async def test_a_job_that_somebody_else_made_under_the_name_is_not_taken_for_ours():
    server = StandIn()
    adapter = at_openai(server)
    ref = await adapter.submit(imitations("name"))
    server.jobs[ref.metadata["job_id"]]["metadata"] = {"etude_job": "name"}
    with pytest.raises(JobNameTakenError, match="other data"):
        await adapter.submit(imitations("name"))


async def test_in_this_process(tmp_path):
    adapter = await adapter_on(tmp_path)
    running = await adapter.submit(collection("name"))
    with pytest.raises(JobNameTakenError, match="other data"):
        await adapter.submit(collection("name", seed=1))
    await adapter.wait_until_complete(running)
    with pytest.raises(JobNameTakenError, match="other data"):
        await adapter.submit(collection("name", rewards=(0.0, 1.0, 2.0, 6.0)))
    assert await adapter.submit(collection("name")) == running
    assert (await adapter.current_version()).number == 1


async def test_in_a_later_process(tmp_path):
    adapter = await adapter_on(tmp_path)
    base = await adapter.current_version()
    await finish(adapter, collection("name"))
    second = await finish(adapter, collection("other", seed=1))
    with pytest.raises(JobNameTakenError, match="other data"):
        await (await adapter_on(tmp_path)).submit(collection("name", seed=1))
    with pytest.raises(JobNameTakenError, match="other hyperparameters"):
        await (await adapter_on(tmp_path, learning_rate=1e-3)).submit(collection("name"))
    # How it is computed is no part of what is learned.
    await (await adapter_on(tmp_path, token_budget=512)).submit(collection("name"))
    later = await adapter_on(tmp_path)
    await later.restore(second)
    with pytest.raises(JobNameTakenError, match="another start model"):
        await later.submit(collection("name"))
    await later.restore(base)
    await later.submit(collection("name"))


async def test_going_back_in_a_later_process_overwrites_no_version(tmp_path):
    adapter = await adapter_on(tmp_path)
    first = await finish(adapter, collection("one"))
    second = await finish(adapter, collection("two", seed=1))
    later = await adapter_on(tmp_path)
    await later.restore(first)
    assert (await finish(later, collection("three", seed=2))).number == 3
    await later.restore(second)
    # Numbers that somebody else knows to be taken are left out, too.
    await later.count_from(6)
    assert (await finish(later, collection("four", seed=3))).number == 7


def test_the_hash_is_of_the_data_and_not_of_the_name():
    assert imitations("a").data_hash() == imitations("b").data_hash()
    assert imitations("a").data_hash() != imitations("a", rows=9).data_hash()
    group = (Sample((1,), (True,), advantages=(numpy.float32(0.5),), notes={"what": object()}),)
    with pytest.raises(PydanticSerializationError):  # Its text would be another one in the next process.
        TrajectoryCollection(trajectories=[group], run_id="a").data_hash()
    plain = [replace(group[0], advantages=(of(0.5),), notes={}) for of in (float, numpy.float32)]
    assert len({TrajectoryCollection(trajectories=[[each]], run_id="a").data_hash() for each in plain}) == 1


STRIDES = pytest.mark.parametrize("stride", one_quick(3, 1))
"""Between two operations at which a process is killed."""


def is_killed_at(count: int, folder: Path, work) -> bool:
    """Whether a process that does `work` is killed at its `count`-th operation on files in `folder`."""
    child = os.fork()
    if child == 0:
        try:
            each_operation(str(folder), killed_at(count))
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@STRIDES
def test_a_version_is_whole_or_not_there_wherever_its_process_is_killed(tmp_path, stride):
    learner = Learner(fresh_policy(), LearnerOptions())
    versions = StateFolders(tmp_path, "v", "version")
    state = learner.snapshot()
    versions.write(1, {"job": "one"}, state)
    count, there = 1, set()
    while is_killed_at(count, tmp_path, lambda: versions.write(2, {"job": "two"}, state)):
        assert versions.damage(1) == []
        if 2 in versions.numbers():
            assert versions.damage(2) == []
            assert versions.facts(2)["job"] == "two"
            versions.prune({1})
        there.add(len(list(tmp_path.glob(".v2*"))))
        delete_left_over(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["v1"]
        count += stride
    assert versions.damage(2) == []
    assert count > 15
    assert there == {0, 1}


def test_so_are_versions_that_are_deleted(tmp_path):
    learner = Learner(fresh_policy(), LearnerOptions())
    versions = StateFolders(tmp_path, "v", "version")
    state, count = learner.snapshot(), 1
    versions.write(1, {"job": "one"}, state)
    while is_killed_at(count, tmp_path, lambda: versions.prune(())):
        assert versions.numbers() == [] or versions.damage(1) == []
        delete_left_over(tmp_path)
        if not versions.numbers():
            versions.write(1, {"job": "one"}, state)
        count += 1
    assert versions.numbers() == []
    assert count > 5


@STRIDES
def test_a_text_is_the_old_one_or_the_new_one(tmp_path, stride):
    path, texts, count = tmp_path / "config.yml", set(), 1
    write_atomically(path, "old")
    while is_killed_at(count, tmp_path, lambda: write_atomically(path, "new" * 10_000)):
        texts.add(path.read_text())
        write_atomically(path, "old")
        delete_left_over(tmp_path)
        assert [each.name for each in tmp_path.iterdir()] == ["config.yml"]
        count += stride
    assert path.read_text() == "new" * 10_000
    assert texts == {"old", "new" * 10_000}
