"""A run whose process is killed for real, again and again."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.forked import Forked
from tests.times import without_times

ROOT = Path(__file__).parent.parent

KILLS = [
    ("request", 3),
    ("request", 12),
    ("submit", 1),
    ("wait", 1),
    ("adopt", 1),
    ("prune", 1),
    ("request", 30),
    ("wait", 2),
]


def train(folder, mode, *kill):
    folder.mkdir(exist_ok=True)
    command = ["-m", "tests.crashing_run", str(folder), mode, *map(str, kill)]
    process = Forked(command, ROOT, dict(os.environ), program="python")
    process.communicate(timeout=60)
    return process.returncode


def told(folder):
    """Everything the run's files say, but for times."""
    lines = (folder / "run" / "training_metrics.jsonl").read_text().splitlines()
    names = ("validation_history.json", "curriculum_state.json", "summary.json")
    files = {name: json.loads((folder / "run" / name).read_text()) for name in names}
    return [without_times(json.loads(line)) for line in lines], without_times(files)


def sampled(folder):
    return (folder / "sampled.log").read_text().splitlines()


@pytest.mark.parametrize("mode", ["now", "ahead"])
def test_a_run_that_is_killed_at_every_turn_ends_where_an_uninterrupted_one_ends(tmp_path, mode):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train(whole, mode) == 0
    for kill in KILLS:
        assert train(killed, mode, *kill) == -signal.SIGKILL, kill
    assert train(killed, mode) == 0
    assert told(killed) == told(whole)
    assert set(sampled(killed)) == set(sampled(whole))
    # What was under way when the process died is sampled again, and nothing else.
    assert len(sampled(killed)) <= len(sampled(whole)) + 8 * len(KILLS)
