"""Runs of one model, of two, and of a trainer that implements only the interface: killed for real, again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.killed import everything
from tests.cli.projects import change, finished
from tests.crashing import killed_and_whole
from tests.file_operations import is_killed
from tests.support import one_quick, read_summary, without_times
from tests.test_docs import ROOT, find_blocks, write_file


def told(folder):
    """The run's figures and all its files, of each target too, but for times and its process."""
    found = {"summary": without_times(read_summary(folder / "run"))}
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
    ("kind", "kills"), one_quick(("now", 6), ("now", 30), ("ahead", 30), ("two", 30), ("two-ahead", 30))
)
def test_a_run_that_is_killed_anywhere_ends_where_an_uninterrupted_one_ends(tmp_path, kind, kills):
    killed, whole = killed_and_whole(kind, tmp_path, kills)
    assert told(killed) == told(whole)
    assert jobs(killed) == jobs(whole) != []
    calls, expected = (
        {path.name: path.read_text().splitlines() for path in folder.glob("sampled-*.log")}
        for folder in (killed, whole)
    )
    assert len(expected) == (2 if kind.startswith("two") else 1)
    for model, keys in expected.items():
        assert set(calls[model]) == set(keys)
        # What was under way when the process died is sampled again, and nothing else.
        assert len(calls[model]) <= len(keys) + 8 * (kills + 1)


EPOCHS = 3
STEP = 20
"""Operations on files from one kill to the next."""


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


def kept(run: Path) -> dict[str, Any]:
    """All that the journal has, and the names of the jobs that were made."""
    return {**everything(run), "jobs": sorted(path.name for path in (run / "checkpoints").glob("*.json"))}


@pytest.mark.slow
def test_a_run_of_ones_own_parts_that_is_killed_anywhere_ends_the_same(own_folder: Path):
    """Runs are killed ever later, and each of them once more when it goes on."""
    assert finished(*command("whole"), folder=own_folder).returncode == 0
    whole = kept(own_folder / "whole" / "run")
    assert len(whole["jobs"]) == EPOCHS
    for number in range(1, 100):
        name = f"killed-{number}"
        if not is_killed(own_folder / name, STEP * number, *command(name), folder=own_folder):
            assert number > 2
            return
        run, resume = own_folder / name / "run", ("resume", f"{own_folder}/{name}/run")
        if not (run / "config.yml").exists() or not (run / "run.db").exists():
            continue  # Nothing is there to go on with.
        if is_killed(own_folder / name, STEP, *resume, folder=own_folder):
            done = finished(*resume, folder=own_folder)
            assert done.returncode == 0, done.stderr
        assert kept(run) == whole
