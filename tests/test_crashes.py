"""Runs of one model, of two, and of a trainer that implements only the interface: killed for real, again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.killed import everything
from tests.cli.projects import change, finished
from tests.crashing import killed_and_whole
from tests.forked import Forked
from tests.support import one_quick, without_times
from tests.test_docs import ROOT, find_blocks, write_file

ONE = [
    ("request", 3),
    ("request", 12),
    ("submit", 1),
    ("wait", 1),
    ("adopt", 1),
    ("prune", 1),
    ("request", 30),
    ("wait", 2),
]
FEW = [("request", 12), ("submit", 1), ("wait", 1), ("adopt", 1), ("prune", 1)]
TWO = [
    ("request", 7),
    ("request", 20),
    ("submit", 1),
    ("submit", 2),
    ("wait", 2),
    ("adopt", 1),
    ("adopt", 2),
    ("prune", 2),
    # The third adoption of a process that was resumed is the first that it makes for a new job.
    ("adopt", 3),
]


def told(folder):
    """Everything the run's files say, of each target too, but for times and the process that wrote them."""
    found = {}
    for path in sorted((folder / "run").rglob("*.json*")):
        if path.parent.name in ("prover", "verifier", "run") and path.name != "environment.json":
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            found[str(path.relative_to(folder))] = [without_times(json.loads(line)) for line in lines]
    return found


def jobs(folder):
    """The jobs that the backends made."""
    made = [path for path in folder.rglob("*-epoch-*.json") if path.parent.name != "run"]
    return sorted(str(path.relative_to(folder)) for path in made)


@pytest.mark.parametrize(
    ("kind", "kills"), one_quick(("now", FEW), ("now", ONE), ("ahead", ONE), ("two", TWO), ("two-ahead", TWO))
)
def test_a_run_that_is_killed_at_every_turn_ends_where_an_uninterrupted_one_ends(tmp_path, kind, kills):
    killed, whole = killed_and_whole(kind, tmp_path, kills)
    assert told(killed) == told(whole)
    assert "run/summary.json" in told(whole)
    assert jobs(killed) == jobs(whole) != []
    calls, expected = (
        {path.name: path.read_text().splitlines() for path in folder.glob("sampled-*.log")}
        for folder in (killed, whole)
    )
    assert len(expected) == (2 if kind.startswith("two") else 1)
    for model, keys in expected.items():
        assert set(calls[model]) == set(keys)
        # What was under way when the process died is sampled again, and nothing else.
        assert len(calls[model]) <= len(keys) + 8 * len(kills)


EPOCHS = 3


@pytest.fixture
def own_folder(tmp_path: Path) -> Path:
    """The files of the page on extending."""
    page = ROOT / "docs" / "extending.md"
    for block in find_blocks(page):
        write_file(block, page, tmp_path)
    change(tmp_path / "config.yml", finetuning__num_epochs=EPOCHS)
    return tmp_path


def command(name: str) -> tuple[str, ...]:
    return ("train", "config.yml", "--name", "run", "-o", f"finetuning.output_dir={name}")


def killed_at(operation: int, own_folder: Path, *arguments: str) -> bool:
    """Whether a command was killed at one of its operations on files, before it was over."""
    words = ["-m", "tests.file_operations", str(own_folder), str(operation), *arguments]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = Forked(words, own_folder.parent, os.environ | {"PYTHONPATH": path}, program="python")
    _, errors = process.communicate(timeout=100)
    assert process.returncode in (0, -9), errors
    return process.returncode == -9


def check(own_folder: Path, step: int, most: int) -> None:
    """Kill runs ever later, and each of them once more when it goes on; compare with one that was not."""
    assert finished(*command("whole"), folder=own_folder).returncode == 0
    whole = kept(own_folder / "whole" / "run")
    assert len(whole["jobs"]) == EPOCHS
    for number in range(1, most):
        name = f"killed-{number}"
        if not killed_at(step * number, own_folder / name, *command(name)):
            assert number > 2
            return
        run, resume = own_folder / name / "run", ("resume", f"{own_folder}/{name}/run")
        if not (run / "run.db").is_file() or not everything(run):
            continue  # Nothing was stored, and nothing is there to go on with.
        if killed_at(step, own_folder / name, *resume):
            done = finished(*resume, folder=own_folder)
            assert done.returncode == 0, done.stderr
        assert kept(run) == whole


def kept(run: Path) -> dict[str, Any]:
    """All that the journal has, and the names of the jobs that were made."""
    return {**everything(run), "jobs": sorted(path.name for path in (run / "checkpoints").glob("*.json"))}


@pytest.mark.slow
def test_a_run_that_is_killed_anywhere_is_resumed_to_the_same_end(own_folder: Path):
    check(own_folder, step=60, most=4)


@pytest.mark.slow
def test_a_run_that_is_killed_at_many_points_is_resumed_to_the_same_end(own_folder: Path):
    check(own_folder, step=3, most=100)
