"""A run whose machine is lost: killed at any moment, its folder gone, gone on with from its storage."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from etude.store.run_folder import RunFolder
from tests.cli.projects import change, events, finished, local_project, process

TIMES = {"timestamp", "seconds", "collecting_seconds", "training_seconds", "tokens_per_s", "storage"}


@pytest.fixture
def deterministic(tmp_path: Path, base: Path) -> Path:
    config = local_project(tmp_path, base)
    change(
        config,
        finetuning__deterministic=True,
        finetuning__num_epochs=3,
        trainer_adapters__local__lora={"r": 4},
        storage={"address": f"file://{tmp_path}/storage", "interval": 0.05},
    )
    return tmp_path


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def everything(run: Path) -> dict[str, Any]:
    """Calls, episodes, scores, epochs and versions, with the digests of their weights."""
    with RunFolder.read(run) as opened:
        kept = {
            key: without_times(value)
            for key, value in opened.journal.scan()
            if not key.startswith("storage/")
        }
    return dict(json.loads(json.dumps(kept).replace(str(run.parent), "RUNS").replace("whole-", "killed-")))


def killed_after(count: int, seconds: float, *arguments: str, folder: Path) -> bool:
    """Run a command and kill it some time after so many events; False when it was over before."""
    running = process(*arguments, "--json", folder=folder)
    assert running.stdout is not None
    for _ in range(count):
        if not running.stdout.readline():
            break
    time.sleep(seconds)
    running.kill()
    running.communicate()
    return running.returncode == -9


def check_losses(folder: Path, losses: int, seed: int) -> None:
    whole = finished("train", "config.yml", "--name", "run", "-o", "storage=null", "--json", folder=folder)
    assert whole.returncode == 0, whole.stderr
    expected = everything(folder / "runs" / "run")
    (folder / "runs").rename(folder / "whole")
    count, choice = len(events(whole.stdout)), random.Random(seed)
    address = f"file://{folder}/storage/run"
    command = ["train", "config.yml", "--name", "run"]
    for _ in range(losses):
        events_seen, seconds = choice.randint(2, count - 2), choice.random() * 0.1
        is_killed = killed_after(events_seen, seconds, *command, folder=folder)
        shutil.rmtree(folder / "runs")
        command = ["resume", address]
        if not is_killed:
            break
    last = finished(*command, "--json", folder=folder)
    assert last.returncode == 0, last.stderr
    assert everything(folder / "runs" / "run") == expected
    # And the backup has all of it.
    shutil.rmtree(folder / "runs")
    again = finished("resume", address, "--json", folder=folder)
    assert again.returncode == 0, again.stderr
    assert everything(folder / "runs" / "run") == expected


def test_a_run_whose_machine_is_lost_twice_ends_as_one_that_was_not(deterministic):
    check_losses(deterministic, losses=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_run_whose_machine_is_lost_many_times_ends_as_one_that_was_not(deterministic, seed):
    check_losses(deterministic, losses=6, seed=seed)


def test_a_head_that_is_still_at_work_stops_when_another_one_goes_on(deterministic):
    change(deterministic / "config.yml", finetuning__num_epochs=40)
    older = process("train", "config.yml", "--name", "run", "--json", folder=deterministic)
    for _ in range(40):
        older.stdout.readline()
    address = f"file://{deterministic}/storage/run"
    few = ["-o", "finetuning.num_epochs=3"]
    newer = finished("resume", address, *few, "--output-dir", "other", "--json", folder=deterministic)
    _, errors = older.communicate(timeout=60)
    assert newer.returncode == 0, newer.stderr
    assert json.loads(newer.stdout.splitlines()[0])["event"] == "restored"
    assert older.returncode == 1
    assert "error: another head goes on with run run: process" in errors
    again = finished("resume", "run", folder=deterministic)
    assert again.returncode == 1
    assert "another head goes on with run run" in again.stderr
