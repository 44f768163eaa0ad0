"""A run of two models whose process is killed for real, again and again."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.test_trainer_crash import without_times

ROOT = Path(__file__).parent.parent
MODELS = ("prover", "verifier")

KILLS = [
    ("request", 7),
    ("request", 20),
    ("submit", 1),
    ("submit", 2),
    ("wait", 2),
    ("adopt", 1),
    ("adopt", 2),
    ("prune", 2),
    ("adopt", 3),
]
"""The third adoption of a process that was resumed is the first that it makes for a new job."""


def train(folder, mode, *kill):
    folder.mkdir(exist_ok=True)
    command = ["-m", "tests.crashing_targets", str(folder), mode, *map(str, kill)]
    process = Forked(command, ROOT, dict(os.environ), program="python")
    process.communicate(timeout=60)
    return process.returncode


def told(folder):
    """Everything the files of all targets say, but for times."""
    found = {}
    for path in sorted((folder / "run").glob("targets/*/*.json*")):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        found[str(path.relative_to(folder))] = [without_times(json.loads(line)) for line in lines]
    return found | {"summary": json.loads((folder / "run" / "summary.json").read_text())}


def sampled(folder, model):
    return (folder / f"sampled-{model}.log").read_text().splitlines()


@pytest.mark.parametrize("mode", ["now", "ahead"])
def test_a_run_of_two_models_that_is_killed_at_every_turn_ends_where_an_uninterrupted_one_ends(
    tmp_path, mode
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(whole, mode) == 0
    for kill in KILLS:
        assert train(killed, mode, *kill) == -signal.SIGKILL, kill
    assert train(killed, mode) == 0
    assert told(killed) == told(whole)
    for model in MODELS:
        assert set(sampled(killed, model)) == set(sampled(whole, model))
        # What was under way when the process died is sampled again, and nothing else.
        assert len(sampled(killed, model)) <= len(sampled(whole, model)) + 8 * len(KILLS)
    assert told(whole)["summary"]["targets"]["prover"]["epochs_trained"] == 2
