"""kill -9 at any moment, then `etude resume`: all that is kept ends up the same, bit for bit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.cli.killed import everything, killed_after, repeatable_project
from tests.cli.projects import change, events, finished


@pytest.fixture
def deterministic(tmp_path: Path, base: Path) -> Path:
    change(repeatable_project(tmp_path, base) / "config.yml", storage=None)
    return tmp_path


def check_kills(folder: Path, kills: int, seed: int) -> None:
    arguments = ["train", "config.yml", "--name", "run"]
    whole = finished(*arguments, "--json", folder=folder)
    assert whole.returncode == 0, whole.stderr
    count, chance = len(events(whole.stdout)), random.Random(seed)
    expected = everything(folder / "runs" / "run")
    shutil.rmtree(folder / "runs")
    for _ in range(kills):
        if not killed_after(chance.randint(2, count - 2), *arguments, folder=folder):
            break
        arguments = ["resume", "run"]
    last = finished("resume", "run", "--json", folder=folder)
    assert last.returncode == 0, last.stderr
    assert everything(folder / "runs" / "run") == expected


@pytest.mark.parametrize("ahead", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["now", "ahead"])
def test_a_run_killed_at_random_ends_as_one_that_was_not(deterministic, ahead):
    change(deterministic / "config.yml", finetuning__collect_ahead=ahead)
    check_kills(deterministic, kills=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 8))
def test_a_run_killed_many_times_ends_as_one_that_was_not(deterministic, seed):
    check_kills(deterministic, kills=6, seed=seed)
