"""Jobs of the adapter `local`, trained in this process and by learners on the nodes of a cluster."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Any

from etude.backends.cluster_training import Learners
from etude.backends.local_adapter import LocalAdapter
from etude.backends.trainer_adapter import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.core.job import TrainingJobRef
from etude.core.sample import TrajectoryCollection
from etude.models.policy import WEIGHTS_FILE, Policy
from etude.models.weights import load_tensors
from etude.processes.pool import Cluster
from etude.processes.ray_cluster import RayConfig, ray_places
from tests.backends.test_local_adapter import collection
from tests.learner.test_team import assert_near

CONFIG = {"learning_rate": 1e-3, "batch_size": 2, "passes": 2}
LONG = {**CONFIG, "passes": 40, "checkpoint_steps": 5}
REWARDS = (0.0, 1.0, 2.0, 5.0, 3.0, 1.0)


def jobs(names: str, **options: Any) -> list[TrajectoryCollection]:
    """A collection for each letter."""
    return [collection(name, seed=seed, rewards=REWARDS, **options) for seed, name in enumerate(names)]


def learners(address: str, folder: Path, count: int, **block: Any) -> Learners:
    """Those of a `cluster` block."""
    config = RayConfig(address=address, runners=0, learners=count, **block)
    (folder / "learners").mkdir(parents=True, exist_ok=True)
    places = partial(ray_places, config=config)
    return Learners(Cluster(None, learners=places), count, folder / "learners", "cpu")


async def adapter_on(
    model: Path, folder: Path, on: Learners | None = None, **config: Any
) -> tuple[LocalAdapter, Policy]:
    """An adapter whose versions are in `folder`, and its policy."""
    policy = Policy.load(model, device="cpu")
    adapter = LocalAdapter(LocalAdapterConfig(**config), policy, folder, 5, on)
    await adapter.initialize(FinetuneConfig(num_epochs=2))
    return adapter, policy


async def assert_same(model: Path, found: Path, wanted: Path, number: int = 1) -> None:
    """The weights of a version are one process's, by how far they have gone."""
    start = Policy.load(model, device="cpu")
    weights = load_tensors(wanted / f"v{number}" / WEIGHTS_FILE)
    if weights.keys() == start.trainable().keys():
        base = start.copy_tensors()
    else:
        base = {name: 0 * value for name, value in weights.items()}
    assert_near(load_tensors(found / f"v{number}" / WEIGHTS_FILE), weights, base)


def newest_step(folder: Path) -> int:
    """Of the checkpoints of the jobs that are not done."""
    steps = [path.name.removeprefix("step-") for path in folder.glob("job-*/step-*[0-9]")]
    return max(map(int, steps), default=0)


async def wait_for_checkpoint(folder: Path, step: int = 1) -> None:
    """Until a job has one at that step or a later one."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        if newest_step(folder) >= step:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"no checkpoint at step {step}: {(folder / 'learners.log').read_text()[-3000:]}")


def ref(name: str) -> TrainingJobRef:
    """Of a job of the adapter's."""
    return TrainingJobRef(run_id=name, backend="local")
