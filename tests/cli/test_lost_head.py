"""A run whose machine is lost: killed at any moment, its folder gone, resumed from its storage."""

from __future__ import annotations

import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

import etude
from tests.cli.killed import everything, killed_after, repeatable_project
from tests.cli.projects import change, events, finished, process, succeed, train_two_models


@pytest.fixture
def deterministic(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return repeatable_project(tmp_path, base)


def whole_run(folder: Path, *command: str) -> tuple[int, dict[str, Any]]:
    """How many events a run has that nothing happens to, and all that it keeps."""
    whole = succeed(*command, "-o", "storage=null", "--json")
    expected = everything(folder / "runs" / "run")
    (folder / "runs").rename(folder / "whole")
    return len(events(whole.stdout)), expected


def check_losses(folder: Path, losses: int, seed: int) -> None:
    command = ["train", "config.yml", "--name", "run"]
    (count, expected), choice = whole_run(folder, *command), random.Random(seed)
    address = f"file://{folder}/storage/run"
    for _ in range(losses):
        events_seen, seconds = choice.randint(2, count - 2), choice.random() * 0.1
        is_killed = killed_after(events_seen, *command, folder=folder, seconds=seconds)
        shutil.rmtree(folder / "runs")
        command = ["resume", address]
        if not is_killed:
            break
    succeed(*command)
    assert everything(folder / "runs" / "run") == expected
    # And the backup has all of it.
    shutil.rmtree(folder / "runs")
    succeed("resume", address)
    assert everything(folder / "runs" / "run") == expected


def test_a_run_whose_machine_is_lost_twice_ends_as_one_that_was_not(deterministic):
    change(deterministic / "config.yml", finetuning__num_epochs=2)
    check_losses(deterministic, losses=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_run_whose_machine_is_lost_many_times_ends_as_one_that_was_not(deterministic, seed):
    check_losses(deterministic, losses=6, seed=seed)


@pytest.mark.slow
def test_a_run_that_trains_two_models_comes_back_with_both(deterministic, base):
    train_two_models(deterministic, base)
    check_losses(deterministic, losses=3, seed=1)


def test_an_evaluation_whose_machine_is_lost_is_gone_on_with_from_python(deterministic):
    command = ("evaluate", "config.yml", "--name", "run", "--repeat", "3")
    _, expected = whole_run(deterministic, *command)
    running = process(*command, folder=deterministic)
    while running.poll() is None and not list((deterministic / "storage").glob("run/run.tar.gz")):
        time.sleep(0.01)
    running.kill()
    running.communicate()
    shutil.rmtree(deterministic / "runs")
    run = etude.resume(f"file://{deterministic}/storage/run", progress=False)
    assert everything(run.folder) == expected


@pytest.mark.slow
def test_a_run_that_another_folder_goes_on_with_is_told_and_not_resumed(deterministic):
    change(deterministic / "config.yml", finetuning__num_epochs=1000)
    older = process("train", "config.yml", "--name", "run", "--json", folder=deterministic)
    for _ in range(40):
        older.stdout.readline()
    address = f"file://{deterministic}/storage/run"
    few = ["-o", "finetuning.num_epochs=3"]
    newer = finished("resume", address, *few, "--output-dir", "other", "--json", folder=deterministic)
    older.kill()
    older.communicate()
    assert newer.returncode == 0, newer.stderr
    assert json.loads(newer.stdout.splitlines()[0])["event"] == "restored"
    again = finished("resume", "run", folder=deterministic)
    assert again.returncode == 1
    assert "another folder has continued this run: process" in again.stderr
