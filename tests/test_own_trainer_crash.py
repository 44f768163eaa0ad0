"""Runs of a trainer that implements only the interface, killed for real and resumed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.killed import everything
from tests.cli.projects import change, finished
from tests.forked import Forked
from tests.test_docs import ROOT, blocks_of, write_file

EPOCHS = 3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of the page on trainers."""
    page = ROOT / "docs" / "own-trainer.md"
    for block in blocks_of(page):
        write_file(block, page, tmp_path)
    change(tmp_path / "config.yml", finetuning__num_epochs=EPOCHS)
    return tmp_path


def command(name: str) -> tuple[str, ...]:
    return ("train", "config.yml", "--name", "run", "-o", f"finetuning.output_dir={name}")


def killed_at(operation: int, folder: Path, *arguments: str) -> bool:
    """Whether a command was killed at one of its operations on files, before it was over."""
    words = ["-m", "tests.file_operations", str(folder), str(operation), *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = Forked(words, folder.parent, os.environ | {"PYTHONPATH": path}, program="python")
    _, errors = process.communicate(timeout=100)
    assert process.returncode in (0, -9), errors
    return process.returncode == -9


def check(folder: Path, step: int, most: int) -> None:
    """Kill runs ever later, and each of them once more when it goes on; compare with one that was not."""
    assert finished(*command("whole"), folder=folder).returncode == 0
    whole = kept(folder / "whole" / "run")
    assert len(whole["jobs"]) == EPOCHS
    for number in range(1, most):
        name = f"killed-{number}"
        if not killed_at(step * number, folder / name, *command(name)):
            assert number > 2
            return
        resume = ("resume", f"{folder}/{name}/run")
        if not everything(folder / name / "run"):
            continue  # Nothing was stored, and nothing is there to go on with.
        if killed_at(step, folder / name, *resume):
            done = finished(*resume, folder=folder)
            assert done.returncode == 0, done.stderr
        assert kept(folder / name / "run") == whole


def kept(run: Path) -> dict[str, Any]:
    """All that the journal has, and the names of the jobs that were made."""
    return {**everything(run), "jobs": sorted(path.name for path in (run / "checkpoints").glob("*.json"))}


def test_a_run_that_is_killed_anywhere_is_resumed_to_the_same_end(folder: Path):
    check(folder, step=60, most=4)


@pytest.mark.slow
def test_a_run_that_is_killed_at_many_points_is_resumed_to_the_same_end(folder: Path):
    check(folder, step=3, most=100)
