"""Runs of trainers that implement only the interface, killed for real at random points and resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.store.run_folder import RunFolder
from tests.test_docs import ROOT, blocks_of, write_file
from tests.times import without_times

FILES = ("training_metrics.jsonl", "validation_history.json", "reward_history.json", "summary.json")
EPOCHS = 3


SLOW = pytest.mark.slow


@pytest.fixture(
    params=["the page's", *(pytest.param(own, marks=SLOW) for own in ("polling", "polling, jobs are lost"))]
)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The files of the page on trainers; its trainer, or one that polls in one loop."""
    page = ROOT / "docs" / "own-trainer.md"
    for block in blocks_of(page):
        write_file(block, page, tmp_path)
    config = yaml.safe_load((tmp_path / "config.yml").read_text())
    config["finetuning"]["num_epochs"] = EPOCHS
    if request.param != "the page's":
        shutil.copy(ROOT / "tests" / "polling_trainer.py", tmp_path / "polling.py")
        config["trainers"] = {"polling": {"_type": "polling:polling"}}
        slow = {"_type": "polling:slow_backend", "learning_rate": 2.0, "forgets": "lost" in request.param}
        config["trainer_adapters"] = {"slow": slow}
        del config["finetuning"]["run_configuration"]
    (tmp_path / "config.yml").write_text(yaml.safe_dump(config))
    return tmp_path


def killed_runs(folder: Path, seed: int, count: int) -> list[Path]:
    """Runs that were killed and resumed, beside the one of `whole/run` that was not."""
    command = [sys.executable, "-m", "tests.crashing_cli", str(folder), str(seed), str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    told = (folder / "output.log").read_text() if (folder / "output.log").exists() else ""
    assert done.returncode == 0, done.stderr + told
    outcomes = json.loads((folder / "outcomes.json").read_text())
    assert len(outcomes) == count
    assert all(outcome["resumed"] == 0 for outcome in outcomes), f"{outcomes}\n{told}"
    # The last point may lie behind the end of a run that is a little shorter than the first one.
    assert sum(outcome["trained"] == -9 for outcome in outcomes) >= count - 1, outcomes
    return [folder / f"killed-{number}" / "run" for number in range(count)]


def everything(run: Path) -> dict[str, Any]:
    """Episodes, scores, jobs, versions and epochs in the journal, and the files; without times and places.

    And without the bill, for a call that was under way at a kill was made twice, and without the config,
    which ends with a digest of itself.
    """
    with RunFolder.read(run) as opened:
        steps = [
            (key, value)
            for key, value in opened.journal.scan()
            if key != "config" and not key.startswith("spent/")
        ]
        found = {key: without_times(value) for key, value in steps}
    for name in (name for name in FILES if (run / name).exists()):
        text = (run / name).read_text()
        if name.endswith(".jsonl"):
            text = f"[{','.join(text.splitlines())}]"
        found[name] = without_times(json.loads(text))
    found["jobs"] = sorted(path.name for path in (run / "checkpoints").glob("*.json"))
    return dict(json.loads(json.dumps(found).replace(str(run), "RUN")))


def check(folder: Path, seed: int, count: int) -> None:
    runs = killed_runs(folder, seed, count)
    whole = everything(folder / "whole" / "run")
    assert len(whole["jobs"]) == EPOCHS
    assert whole["summary.json"]["last_version"]["number"] == EPOCHS
    for run in runs:
        assert everything(run) == whole


def test_a_run_that_is_killed_anywhere_is_resumed_to_the_same_end(folder: Path):
    check(folder, seed=1, count=4)


@pytest.mark.slow
def test_a_run_that_is_killed_at_fifty_points_is_resumed_to_the_same_end(folder: Path):
    check(folder, seed=2, count=50)
