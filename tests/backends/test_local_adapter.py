"""Training in this process: jobs are found again, versions are whole, failures leave no trace."""

import asyncio
import resource
import shutil
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.backends.local_adapter import LocalAdapter
from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig, LoraOptions
from etude.core.errors import EngineError, StoreError, TrainingError
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingStatusEnum
from etude.core.sample import TrajectoryCollection
from etude.core.trajectory import DPOItem, Trajectory
from etude.engines.embedded import EmbeddedEngine
from etude.store.files import DamagedError
from tests.learner.gradients import forest, sequences
from tests.models.tiny_models import family, fresh_policy, policy

CONFIG = {"learning_rate": 1e-2, "batch_size": 3, "passes": 2, "warmup_steps": 3}


def with_reward(sample, reward):
    return replace(sample, reward=reward, advantages=None)


def collection(name, *, seed=0, method="grpo", rewards=(0.0, 1.0, 2.0, 5.0)):
    group = map(with_reward, sequences(policy(), len(rewards), seed=seed), rewards)
    return TrajectoryCollection(trajectories=[[*group]], run_id=name, method=method)


def not_finite(name):
    """A job that fails at the step of its first sequence."""
    bad = collection(name)
    first, *others = bad.groups[0]
    first = replace(first, logprobs=(float("nan"),) * len(first.ids))
    return bad.model_copy(update={"groups": [[first, *others]]})


async def adapter_on(folder, of=None, **config):
    adapter = LocalAdapter(LocalAdapterConfig(**CONFIG | config), of or fresh_policy(), folder, seed=5)
    await adapter.initialize(FinetuneConfig())
    return adapter


async def finish(adapter, job):
    """Submit a job, wait for it, and return its version. Fails when it does."""
    status = await adapter.wait_until_complete(await adapter.submit(job))
    assert status.status is TrainingStatusEnum.COMPLETED, status.message
    return status.version


def everything(adapter):
    """All that the next job depends on."""
    learner, of = adapter._workplace.learner, adapter._policy
    names = {parameter: name for name, parameter in of.trainable().items()}
    state = learner.optimiser.adam.state
    return (
        of.version,
        learner.step,
        {name: value.tolist() for name, value in of.trainable().items()},
        {
            (names[parameter], part): value.tolist()
            for parameter, parts in state.items()
            for part, value in parts.items()
        },
    )


async def test_a_job_makes_the_next_version_and_its_folder(tmp_path):
    adapter = await adapter_on(tmp_path)
    assert await adapter.is_healthy()
    base = await adapter.current_version()
    assert (base.number, base.location) == (0, "tiny")
    version = await finish(adapter, collection("one"))
    assert version == await adapter.current_version()
    assert (version.number, version.location) == (1, str(tmp_path / "v1"))
    assert version.digest != base.digest
    status = await adapter.status(TrainingJobRef(run_id="one", backend="local"))
    assert status.progress == 100.0
    assert status.metadata["metrics"].keys() >= {"loss", "grad_norm", "clip_fraction"}


async def test_a_model_that_cannot_be_trained_on_token_trees_is_said_to_be_padded(tmp_path):
    rows = [with_reward(one, float(reward)) for reward, one in enumerate(forest(1, 12))]
    statuses = []
    for number, of in enumerate([fresh_policy(), family("FalconConfig", alibi=True)]):
        adapter = await adapter_on(tmp_path / str(number), of, batch_size=None)
        ref = await adapter.submit(TrajectoryCollection(trajectories=[rows], run_id="one", method="grpo"))
        statuses.append(await adapter.wait_until_complete(ref))
    assert [status.status for status in statuses] == [TrainingStatusEnum.COMPLETED] * 2
    assert statuses[0].message is None
    assert "computed for each" in statuses[1].message


async def test_jobs_that_are_submitted_at_once_make_one_version_each(tmp_path):
    adapter = await adapter_on(tmp_path)
    refs = [await adapter.submit(collection(name, seed=seed)) for seed, name in enumerate("abc")]
    found = [(await adapter.wait_until_complete(ref)).version for ref in refs]
    assert sorted(version.number for version in found) == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v1", "v2", "v3"]


class Held:
    """Holds a policy's training before its model, so that a test decides when it goes on."""

    def __init__(self, of):
        self.entered, self.gate = threading.Event(), threading.Event()
        forward = of.model.forward

        def wait_and_run(*args, **kwargs):
            self.entered.set()
            self.gate.wait()
            return forward(*args, **kwargs)

        of.model.forward = wait_and_run


async def test_a_running_job_tells_so_and_can_be_canceled(tmp_path):
    of = fresh_policy()
    adapter = await adapter_on(tmp_path, of)
    before = everything(adapter)
    held = Held(of)
    ref = await adapter.submit(collection("one"))
    await asyncio.to_thread(held.entered.wait)
    assert (await adapter.status(ref)).status is TrainingStatusEnum.RUNNING
    cancel = asyncio.create_task(adapter.cancel(ref))
    await asyncio.sleep(0)
    held.gate.set()
    await cancel
    status = await adapter.status(ref)
    assert status.status is TrainingStatusEnum.CANCELED
    assert "canceled after" in status.message
    assert everything(adapter) == before
    assert not list(tmp_path.iterdir())
    await adapter.cleanup()


async def test_a_failed_job_leaves_weights_and_optimiser_as_they_were(tmp_path):
    adapter = await adapter_on(tmp_path)
    await finish(adapter, collection("one"))
    before = everything(adapter)
    status = await adapter.wait_until_complete(await adapter.submit(not_finite("two")))
    assert status.status is TrainingStatusEnum.FAILED
    assert "not finite" in status.message
    assert everything(adapter) == before
    assert [path.name for path in tmp_path.glob("v*")] == ["v1"]
    assert (await finish(adapter, collection("three"))).number == 2


async def test_running_out_of_memory_says_what_to_lower(tmp_path):
    of = fresh_policy()
    adapter = await adapter_on(tmp_path, of)
    before = everything(adapter)

    def run_out(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 1 TiB")

    of.model.forward = run_out
    status = await adapter.wait_until_complete(await adapter.submit(collection("one")))
    assert status.status is TrainingStatusEnum.FAILED
    assert "tried to allocate 1 TiB" in status.message
    assert "lower token_budget" in status.message
    assert everything(adapter) == before


@contextmanager
def full_disk(size):
    """No file may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [1000, 150_000])
async def test_a_full_disk_leaves_the_old_version_whole(tmp_path, size):
    """The smaller size is too small for the weights, the larger one for the optimiser's state."""

    def files() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    adapter = await adapter_on(tmp_path)
    await finish(adapter, collection("one"))
    files_before = files()
    weights = (tmp_path / "v1" / "trained.safetensors").stat().st_size
    assert 1000 < weights < 150_000 < (tmp_path / "v1" / "optimiser.safetensors").stat().st_size
    before = everything(adapter)
    with full_disk(size):
        ref = await adapter.submit(collection("two"))
        await adapter.wait_until_complete(ref)
    with pytest.raises(StoreError, match=r"save version 2.*free some space"):
        await adapter._jobs["two"].task
    assert (await adapter.status(ref)).status is TrainingStatusEnum.FAILED
    assert files() == files_before
    assert [path.name for path in tmp_path.glob("v*")] == ["v1"]
    assert everything(adapter) == before


async def test_a_job_that_was_done_when_the_process_died_is_found_and_gone_on_from(tmp_path):
    """The journal knows version 1; version 2 is on the disk, and only the engine adopts it."""
    whole = await adapter_on(tmp_path / "whole")
    for seed, name in enumerate("abc"):
        await finish(whole, collection(name, seed=seed))

    first = await adapter_on(tmp_path / "cut")
    journalled = await finish(first, collection("a", seed=0))
    await finish(first, collection("b", seed=1))
    of = fresh_policy()
    resumed = await adapter_on(tmp_path / "cut", of)
    await resumed.restore(journalled)
    status = await resumed.status(TrainingJobRef(run_id="b", backend="local"))
    assert status.status is TrainingStatusEnum.COMPLETED
    engine = EmbeddedEngine(of)
    await engine.adopt(status.version)
    assert engine.version == 2
    assert (await finish(resumed, collection("c", seed=2))).number == 3
    assert everything(resumed) == everything(whole)
    await engine.close()


async def test_a_run_folder_may_be_moved(tmp_path):
    first = await adapter_on(tmp_path / "here")
    version = await finish(first, collection("a"))
    shutil.move(tmp_path / "here", tmp_path / "there")
    moved = await adapter_on(tmp_path / "there")
    found = (await moved.status(TrainingJobRef(run_id="a", backend="local"))).version
    assert found.location == str(tmp_path / "there" / "v1")
    await moved.restore(version)
    assert everything(moved) == everything(first)


async def test_a_job_from_the_base_model_still_makes_the_next_version(tmp_path):
    """Though versions are written beside the run, none is lost to another that takes its place in memory."""
    config = LocalAdapterConfig(**CONFIG, checkpoint_seconds=1e9)
    adapter = LocalAdapter(config, fresh_policy(), tmp_path, 5, writes_each=False)
    await adapter.initialize(FinetuneConfig())
    base = await adapter.current_version()
    one = await finish(adapter, collection("one"))
    await adapter.restore(base)
    assert adapter._workplace.learner.step == 0
    again = await finish(adapter, collection("two"))
    assert (one.number, again.number) == (1, 2)
    assert again.digest == one.digest  # The same data, from the same start.
    await adapter.cleanup()
    assert adapter._versions.damage(1) == adapter._versions.damage(2) == []


async def test_pruning_keeps_what_is_asked_for_and_what_is_in_memory(tmp_path):
    adapter = await adapter_on(tmp_path)
    versions = [await finish(adapter, collection(name)) for name in "abcd"]
    await adapter.prune([versions[1]])
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v2", "v4"]
    ref = TrainingJobRef(run_id="a", backend="local")
    assert (await adapter.status(ref)).version == versions[0]  # It was done, though its weights are gone.
    await adapter.restore(versions[1])
    assert (await adapter.current_version()) == versions[1]
    with pytest.raises(DamagedError, match="v1 is missing"):
        await adapter.restore(versions[0])
    assert (await adapter.current_version()) == versions[1]


@pytest.mark.parametrize("name", ["job.json", "optimiser.safetensors"])
async def test_the_job_of_a_damaged_version_is_made_again(tmp_path, caplog, name):
    adapter = await adapter_on(tmp_path)
    version = await finish(adapter, collection("one"))
    (tmp_path / "v1" / name).write_text("{")
    (clause,) = await adapter.damage(version)
    assert clause.startswith(f"v1/{name} is not")
    resumed = await adapter_on(tmp_path)
    ref = TrainingJobRef(run_id="one", backend="local")
    assert (await resumed.status(ref)).status is TrainingStatusEnum.NOT_FOUND
    assert (await resumed.wait_until_complete(ref)).status is TrainingStatusEnum.NOT_FOUND
    await resumed.cancel(ref)
    assert f"version 1 is damaged ({clause})" in caplog.text and "v1.set-aside-1" in caplog.text
    assert await finish(resumed, collection("one")) == version
    assert sorted(path.name for path in tmp_path.glob("v*")) == ["v1", "v1.set-aside-1"]


async def test_lora_weights_are_versions_too(tmp_path):
    adapter = await adapter_on(tmp_path, lora=LoraOptions(r=2))
    base = await adapter.current_version()
    version = await finish(adapter, collection("one"))
    resumed = await adapter_on(tmp_path, lora=LoraOptions(r=2))
    assert await resumed.current_version() == base
    await resumed.restore(version)
    assert everything(resumed) == everything(adapter)
    full = await adapter_on(tmp_path)
    with pytest.raises(EngineError, match="another model or LoRA setting"):
        await full.restore(version)


async def test_preferences_in_words_need_the_base_for_reference(tmp_path):
    pair = DPOItem(prompt="what is 1 plus 2?", chosen_response="it is 3.", rejected_response="it is 4.")
    job = TrajectoryCollection(
        trajectories=[[Trajectory(episode=[pair], reward=1.0)]], run_id="one", method="dpo"
    )
    with pytest.raises(TrainingError, match="reference: base"):
        await (await adapter_on(tmp_path)).submit(job)
    adapter = await adapter_on(tmp_path)
    adapter.algorithm = Dpo(reference="base")
    assert (await finish(adapter, job)).number == 1


@pytest.mark.parametrize("lora", [None, LoraOptions(r=4)], ids=["all weights", "LoRA"])
async def test_collecting_ahead_the_engine_samples_from_the_weights_as_they_were_while_others_are_made(
    tmp_path, lora
):
    ahead, same = fresh_policy(), fresh_policy()
    twin = LocalAdapter(LocalAdapterConfig(**CONFIG, lora=lora), ahead, tmp_path / "ahead", seed=5)
    await twin.initialize(FinetuneConfig(collect_ahead=True))
    shared = await adapter_on(tmp_path / "shared", same, lora=lora)
    assert await twin.current_version() == await shared.current_version()
    base = ahead.digest()

    held = Held(twin._policy)
    ref = await twin.submit(collection("one"))
    await asyncio.to_thread(held.entered.wait)
    async with asyncio.timeout(60):  # Training holds its own lock, and not the engine's.
        await asyncio.to_thread(ahead.digest)
    held.gate.set()
    version = (await twin.wait_until_complete(ref)).version
    assert (ahead.version, ahead.digest()) == (0, base)
    assert version.digest == (await finish(shared, collection("one"))).digest

    engine = EmbeddedEngine(ahead)
    await engine.adopt(version)
    assert (ahead.version, ahead.digest()) == (1, version.digest)
    await engine.adopt(ModelVersion(number=0, location="tiny", digest=base))
    assert ahead.digest() == base
    await engine.close()


@pytest.mark.parametrize(("options", "is_made"), [({}, False), ({"beta": 0.1}, True)])
async def test_groups_of_equal_rewards_make_no_job_unless_the_loss_has_more_than_rewards(
    tmp_path, options, is_made
):
    adapter = await adapter_on(tmp_path)
    adapter.algorithm = Grpo(**options)
    result = await adapter.submit(collection("flat", rewards=(1.0, 1.0)))
    assert isinstance(result, Skipped) is not is_made
    assert (await adapter.status(TrainingJobRef(run_id="flat", backend="local"))).status is (
        TrainingStatusEnum.RUNNING if is_made else TrainingStatusEnum.NOT_FOUND
    )
    await adapter.cleanup()


async def test_an_adapter_that_is_not_initialized_says_why_it_is_not_healthy(tmp_path):
    adapter = LocalAdapter(LocalAdapterConfig(), fresh_policy(), tmp_path, seed=5)
    assert not await adapter.is_healthy()
    assert "call initialize(run_config)" in adapter.unhealthy_because
    with pytest.raises(TrainingError, match="not initialized"):
        await adapter.submit(collection("one"))
    await adapter.initialize(FinetuneConfig())
    assert await adapter.is_healthy() and adapter.unhealthy_because is None
