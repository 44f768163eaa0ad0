"""The adapter `local` on the nodes of a cluster: the weights of one process, whatever is lost meanwhile."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from etude.core.job import TrainingStatusEnum
from tests.backends.test_local_adapter import finish
from tests.models.tiny_models import fresh_policy
from tests.processes.cluster_jobs import (
    CONFIG,
    LONG,
    adapter_on,
    assert_same,
    jobs,
    learners,
    newest_step,
    ref,
    wait_for_checkpoint,
)

pytestmark = pytest.mark.cluster

LORA = {"r": 2, "alpha": 4.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    fresh_policy().export(folder)
    return folder


@pytest.mark.parametrize(
    "config",
    [{}, {"lora": LORA, "shard_training": True}, {"shard_training": True, "gradient_checkpointing": True}],
    ids=["copies", "LoRA in shards", "shards"],
)
async def test_two_nodes_make_the_versions_of_one_process(
    cluster: Any, model: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    """Two jobs: the second begins with the optimiser's state that the first has left."""
    here, _ = await adapter_on(model, tmp_path / "here", **CONFIG | config | {"shard_training": False})
    on = learners(cluster.address, tmp_path, 2)
    there, policy = await adapter_on(model, tmp_path / "there", on, **CONFIG | config)
    for number, job in enumerate(jobs("ab"), 1):
        wanted, version = await finish(here, job), await finish(there, job)
        assert version.number == wanted.number == number
        assert policy.digest() == version.digest
        await assert_same(model, tmp_path / "there", tmp_path / "here", number)
    status = await there.status(ref("b"))
    assert status.metadata is not None and status.metadata["metrics"].keys() >= {"loss", "grad_norm"}
    assert not list(on.folder.glob("job-*"))


@pytest.fixture(scope="module")
def one_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The versions of an adapter that has trained the long job in this process."""
    folder = tmp_path_factory.mktemp("alone")

    async def train() -> None:
        here, _ = await adapter_on(model, folder, **LONG)
        await finish(here, jobs("a")[0])

    asyncio.run(train())
    return folder


async def test_a_lost_node_is_waited_for(
    cluster: Any, model: Path, tmp_path: Path, one_process: Path
) -> None:
    on = learners(cluster.address, tmp_path, 2)
    there, _ = await adapter_on(model, tmp_path, on, **LONG)
    await there.submit(jobs("a")[0])
    await wait_for_checkpoint(on.folder, 10)
    await asyncio.to_thread(cluster.remove_node, cluster.list_all_nodes()[-1], allow_graceful=False)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await there.wait_until_complete(ref("a"))
        step = newest_step(on.folder)
        await asyncio.sleep(5)
        assert newest_step(on.folder) == step
    finally:
        cluster.add_node(num_cpus=1)  # In this thread: Ray sets signal handlers.
    status = await there.wait_until_complete(ref("a"))
    assert status.status is TrainingStatusEnum.COMPLETED, status.message
    await assert_same(model, tmp_path, one_process)


async def test_a_canceled_job_ends_its_learners_and_goes_on_from_there_when_it_is_submitted_again(
    cluster: Any, model: Path, tmp_path: Path, one_process: Path
) -> None:
    on = learners(cluster.address, tmp_path, 2)
    there, policy = await adapter_on(model, tmp_path / "there", on, **LONG)
    before = policy.digest()
    await there.submit(jobs("a")[0])
    await wait_for_checkpoint(on.folder, 10)
    await there.cancel(ref("a"))
    assert (await there.status(ref("a"))).status is TrainingStatusEnum.CANCELED
    assert policy.digest() == before and newest_step(on.folder) >= 10
    again, _ = await adapter_on(model, tmp_path / "there", on, **LONG)
    await finish(again, jobs("a")[0])
    await assert_same(model, tmp_path / "there", one_process)
