"""Runs of one model, of two, with earlier versions, with a warm-up, of own parts: killed for real."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.killed import everything
from tests.cli.projects import change, run_to_end
from tests.crashing import killed_and_whole
from tests.file_operations import is_killed
from tests.support import one_quick, read_summary, without_times
from tests.test_docs import ROOT, find_blocks, write_file


def results(folder):
    """The run's journal, figures and files, of each target too, but for times and the process."""
    found = {**everything(folder / "run"), "summary": without_times(read_summary(folder / "run"))}
    for path in sorted((folder / "run").rglob("*.json*")):
        if path.parent.name in ("prover", "verifier", "run") and path.name != "environment.json":
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            found[str(path.relative_to(folder))] = [without_times(json.loads(line)) for line in lines]
    return json.loads(json.dumps(found).replace(str(folder), "HERE"))


def jobs(folder):
    """The jobs that the backends made."""
    made = [path for path in folder.rglob("*-epoch-*.json") if path.parent.name != "run"]
    return sorted(str(path.relative_to(folder)) for path in made)


LOGS = {"now": 1, "ahead": 1, "two": 2, "two-ahead": 2, "pool": 0, "warm-up": 0}
"""By kind: the models that log what is sampled from them."""


@pytest.mark.parametrize(
    ("kind", "kills"), one_quick(("now", 6), *((kind, 30 if models else 8) for kind, models in LOGS.items()))
)
def test_a_run_that_is_killed_anywhere_ends_where_an_uninterrupted_one_ends(tmp_path, kind, kills):
    killed, whole = killed_and_whole(kind, tmp_path, kills)
    assert results(killed) == results(whole)
    assert jobs(killed) == jobs(whole)
    assert jobs(whole) or kind == "warm-up"  # Which trains here.
    calls, expected = (
        {path.name: path.read_text().splitlines() for path in folder.glob("sampled-*.log")}
        for folder in (killed, whole)
    )
    assert len(expected) == LOGS[kind]
    for model, keys in expected.items():
        assert set(calls[model]) == set(keys)
        # What was under way when the process died is sampled again, and nothing else.
        assert len(calls[model]) <= len(keys) + 8 * (kills + 1)


EPOCHS = 3
STEP = 20
"""Operations on files from one kill to the next."""


def command(name: str) -> tuple[str, ...]:
    return ("train", "config.yml", "--name", "run", "-o", f"finetuning.output_dir={name}")


def stored_steps(run: Path) -> dict[str, Any]:
    """All that the journal has, and the names of the jobs that were made."""
    return {**everything(run), "jobs": sorted(path.name for path in (run / "checkpoints").glob("*.json"))}


@pytest.mark.slow
def test_a_run_of_ones_own_parts_that_is_killed_anywhere_ends_the_same(tmp_path: Path):
    """Those of the page on extending. Runs are killed ever later, and each once more when it goes on."""
    page = ROOT / "docs" / "extending.md"
    for block in find_blocks(page):
        write_file(block, page, tmp_path)
    change(tmp_path / "config.yml", finetuning__num_epochs=EPOCHS)
    run_to_end(*command("whole"), folder=tmp_path)
    whole = stored_steps(tmp_path / "whole" / "run")
    assert len(whole["jobs"]) == EPOCHS
    for number in range(1, 100):
        name = f"killed-{number}"
        if not is_killed(tmp_path / name, STEP * number, *command(name), folder=tmp_path):
            assert number > 2
            return
        run, resume = tmp_path / name / "run", ("resume", f"{tmp_path}/{name}/run")
        if not (run / "config.yml").exists() or not (run / "run.db").exists():
            continue  # Nothing is there to go on with.
        if is_killed(tmp_path / name, STEP, *resume, folder=tmp_path):
            run_to_end(*resume, folder=tmp_path)
        assert stored_steps(run) == whole
