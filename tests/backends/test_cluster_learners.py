"""The adapter `local` with learners in other processes, started here by a launcher without a cluster."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from etude.backends.capabilities import LocalAdapterConfig
from etude.backends.learning import Learners
from etude.backends.local_adapter import LocalAdapter
from etude.cluster.launch import MARK
from etude.config.finetuning import FinetuneConfig
from etude.core.job import TrainingStatusEnum
from etude.models.policy import Policy
from etude.store.run_folder import RunLock
from tests.backends.test_local_adapter import CONFIG, collection, done
from tests.models.tiny_models import fresh_policy

PROGRAM = """
import sys
from pathlib import Path
from etude.backends import learning
from etude.cluster.launch import Seat
from etude.backends.local_job import JobDesk

desk = JobDesk(sys.argv[1])

def call(name, *args):
    return False if name == "stopping" else getattr(desk, args[0])(*args[1:])

sys.exit(learning.main(Seat(0, "here", Path(sys.argv[1]).parent, "mark", call), sys.argv[1]))
"""
"""A team of one, whose desk is in its own process."""


class OneProcess:
    """Starts a team of one on this machine."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.started = 0

    def command(self, module: str, arguments: Sequence[str], processes: int, folder: Path) -> list[str]:
        self.started += 1
        return [sys.executable, "-c", self.program, *arguments]

    def first_failure(self, log: str) -> str | None:
        return None


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    fresh_policy().export(folder)
    return folder


async def adapter_on(model: Path, folder: Path, launcher: OneProcess | None = None) -> LocalAdapter:
    learners = None
    if launcher is not None:
        (folder / "learners").mkdir(parents=True)
        (folder / "learners" / MARK).write_text("mark")
        learners = Learners(launcher, 1, folder / "learners", "cpu", asyncio.Lock())
    policy = Policy.load(model, device="cpu")
    adapter = LocalAdapter(LocalAdapterConfig(**CONFIG), policy, folder, 5, learners)
    await adapter.initialize(FinetuneConfig())
    return adapter


async def test_a_process_elsewhere_makes_the_same_version_and_says_how_it_went(model: Path, tmp_path: Path):
    """Bit for bit: one process there does what one here does."""
    here = await adapter_on(model, tmp_path / "here")
    there = await adapter_on(model, tmp_path / "there", launcher := OneProcess(PROGRAM))
    team = RunLock(tmp_path / "there" / "learners" / "lock")  # As the team's command would hold it.
    wanted, version = await done(here, collection("a")), await done(there, collection("a"))
    assert (version.number, version.digest) == (wanted.number, wanted.digest)
    facts = [json.loads((tmp_path / at / "v1" / "job.json").read_text()) for at in ("here", "there")]
    assert facts[0]["content"] == facts[1]["content"]
    team.release()
    assert (await there.current_version()).digest == wanted.digest
    assert launcher.started == 1 and not list((tmp_path / "there" / "learners").glob("job-*"))


async def test_a_folder_that_is_not_shared_fails_the_job_with_that_reason(model: Path, tmp_path: Path):
    adapter = await adapter_on(model, tmp_path, launcher := OneProcess(PROGRAM))
    (tmp_path / "learners" / MARK).write_text("another")
    status = await adapter.wait_until_complete(await adapter.submit(collection("one")))
    assert status.status is TrainingStatusEnum.FAILED and launcher.started == 1
    assert "on node here is not the folder that the head has there" in str(status.message)
    assert (await adapter.current_version()).number == 0


async def test_learners_that_end_three_times_without_a_checkpoint_fail_the_job(model: Path, tmp_path: Path):
    launcher = OneProcess("print('no room'); raise SystemExit(3)")
    adapter = await adapter_on(model, tmp_path, launcher)
    status = await adapter.wait_until_complete(await adapter.submit(collection("one")))
    assert status.status is TrainingStatusEnum.FAILED and launcher.started == 3
    assert "ended 3 times without a checkpoint (exit code 3)" in str(status.message)
    assert "no room" in str(status.message)
