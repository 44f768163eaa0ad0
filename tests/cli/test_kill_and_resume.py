"""kill -9 at any moment, then `etude resume`: the weights end up the same, bit for bit."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.projects import change, events, finished, local_project, process

EPOCHS = 3


@pytest.fixture
def deterministic(tmp_path: Path, base: Path) -> Path:
    config = local_project(tmp_path, base)
    change(
        config,
        finetuning__deterministic=True,
        finetuning__num_epochs=EPOCHS,
        trainer_adapters__local__lora={"r": 4},
        trainers={"epochs": {"_type": "epochs", "keep_checkpoints": "all"}},
    )
    return tmp_path


def summary(folder: Path, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs" / run / "summary.json").read_text())
    return {key: value for key, value in found.items() if key != "run_id"}


def without_places(found: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(found).replace("runs/whole/", "runs/killed/"))


def killed_after(count: int, *arguments: str, folder: Path) -> bool:
    """Run a command and kill it after so many events; False when it was over before."""
    running = process(*arguments, "--json", folder=folder)
    assert running.stdout is not None
    for _ in range(count):
        if not running.stdout.readline():
            assert running.wait() == 0, running.stderr.read() if running.stderr else ""
            return False
    running.kill()
    running.communicate()
    return True


def check_kills(folder: Path, kills: int, seed: int) -> None:
    whole = finished("train", "config.yml", "--name", "whole", "--json", folder=folder)
    assert whole.returncode == 0, whole.stderr
    count, random_places = len(events(whole.stdout)), random.Random(seed)
    arguments = ["train", "config.yml", "--name", "killed"]
    for _ in range(kills):
        if not killed_after(random_places.randint(2, count - 2), *arguments, folder=folder):
            break
        arguments = ["resume", "killed"]
    last = finished("resume", "killed", "--json", folder=folder)
    assert last.returncode == 0, last.stderr
    assert summary(folder, "killed") == without_places(summary(folder, "whole"))


@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["now", "ahead"])
def test_a_run_killed_at_random_ends_as_one_that_was_not(deterministic, ahead):
    change(deterministic / "config.yml", finetuning__collect_ahead=ahead)
    check_kills(deterministic, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_a_run_killed_many_times_ends_as_one_that_was_not(deterministic, seed):
    check_kills(deterministic, kills=6, seed=seed)
    shutil.rmtree(deterministic / "runs")
