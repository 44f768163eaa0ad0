"""Runs of one model and of two whose process is killed for real, again and again."""

import json

import pytest

from tests.crashing import killed_and_whole
from tests.support import without_times

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
    """Everything the run's files say, of each target too, but for times."""
    found = {}
    for path in sorted((folder / "run").rglob("*.json*")):
        if path.parent.name in ("prover", "verifier", "run"):
            lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
            found[str(path.relative_to(folder))] = [without_times(json.loads(line)) for line in lines]
    return found


def jobs(folder):
    """The jobs that the backends made."""
    made = [path for path in folder.rglob("*-epoch-*.json") if path.parent.name != "run"]
    return sorted(str(path.relative_to(folder)) for path in made)


@pytest.mark.parametrize(("kind", "kills"), [("now", ONE), ("ahead", ONE), ("two", TWO), ("two-ahead", TWO)])
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
