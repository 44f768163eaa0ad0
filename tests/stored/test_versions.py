"""Which version is meant."""

import json
from pathlib import Path

import pytest

from etude.core.errors import RequestError
from etude.core.history import EpochEntry, ValidationEntry
from etude.core.job import ModelVersion
from etude.epochs.log import EpochLog
from etude.store.run_folder import RunFolder
from etude.stored.versions import choose_version, run_version, stored_at


def version(run: Path, number: int) -> ModelVersion:
    return ModelVersion(number=number, location=str(run / "checkpoints" / f"v{number}"), digest=f"d{number}")


@pytest.fixture
async def run(tmp_path):
    """Three versions, of which the second was the best and the first was not kept."""
    with RunFolder.create(tmp_path, "r") as folder:
        log = EpochLog(folder.journal)
        rewards = {1: 0.3, 2: 0.9, 3: 0.6}
        for number, reward in rewards.items():
            made = version(folder.path, number)
            await log.add_epoch(EpochEntry(epoch=number - 1, timestamp="", version=made))
            metrics = {"avg_reward": reward}
            await log.add_validation(
                ValidationEntry(epoch=number, timestamp="", metrics=metrics, version=made)
            )
            if number > 1:
                (folder.checkpoints / f"v{number}").mkdir()
        return folder.path


@pytest.mark.parametrize(
    ("wish", "number"), [("best", 2), ("last", 3), ("v3", 3), ("2", 2), ("base", 0), ("v0", 0)]
)
def test_wishes(run, wish, number):
    assert choose_version(run, wish).number == number


@pytest.mark.parametrize(
    ("text", "shown"), [("r", "r:v2"), ("r:v3", "r:v3"), ("r:last", "r:v3"), ("r:base", "r:base")]
)
def test_runs_by_name_and_by_folder(run, text, shown):
    assert str(run_version(text, run.parent)) == shown
    assert str(run_version(str(run.parent / text), Path("elsewhere"))) == shown


@pytest.mark.parametrize("text", ["Qwen/Qwen3-0.6B", "./model", "gpt-4:latest", "runs"])
def test_other_names_are_no_runs(run, text):
    assert run_version(text, run.parent / "other") is None


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ("v9", "has no version v9; it has v1, v2, v3"),
        ("v1", "were not kept; there are v2, v3"),
        ("x", "no version"),
    ],
)
def test_versions_that_are_not_there(run, wish, reason):
    with pytest.raises(RequestError, match=reason):
        choose_version(run, wish)


def test_a_run_that_has_trained_nothing_yet(tmp_path):
    RunFolder.create(tmp_path, "new").close()
    with pytest.raises(RequestError, match="no trained version yet"):
        choose_version(tmp_path / "new")


def test_weights_are_found_where_the_run_is_now(tmp_path):
    old = ModelVersion(number=3, location="/elsewhere/runs/r/checkpoints/prover/v3", digest="d")
    assert stored_at(tmp_path, old) == tmp_path / "checkpoints" / "prover" / "v3"
    remote = ModelVersion(number=3, location="ft:gpt-4:me", digest="d")
    assert stored_at(tmp_path, remote) is None
    assert json.loads(remote.model_dump_json())["location"] == "ft:gpt-4:me"
