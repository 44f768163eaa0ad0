"""Which version is meant."""

import json
from pathlib import Path

import pytest

from etude.core.errors import RequestError
from etude.core.history import EpochEntry, ValidationEntry
from etude.core.job import ModelVersion
from etude.store.log import EpochLog
from etude.store.run_folder import RunFolder
from etude.store.versions import choose_version, run_version, stored_at


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


def test_without_a_wish_the_version_says_why_it_was_taken(run):
    assert choose_version(run).choice == "the version with the best validation"
    assert choose_version(run, "last").choice == "the last version"
    assert choose_version(run, "v3").choice == ""


async def test_where_no_version_was_measured_after_training_none_is_the_best(tmp_path):
    with RunFolder.create(tmp_path, "r") as folder:
        made = version(folder.path, 1)
        (folder.checkpoints / "v1").mkdir()
        await EpochLog(folder.journal).add_epoch(
            EpochEntry(epoch=0, timestamp="", version=made, metrics={"avg_reward": 0.9})
        )
    with pytest.raises(RequestError, match=r"r:last is the last one, v1.*validation_dataset"):
        choose_version(tmp_path / "r", "best")
    chosen = choose_version(tmp_path / "r")
    assert (chosen.number, chosen.choice) == (1, "the last version; none was measured after it was trained")


async def test_the_base_model_is_the_best_where_training_made_it_worse(tmp_path):
    with RunFolder.create(tmp_path, "r") as folder:
        log = EpochLog(folder.journal)
        await log.add_epoch(EpochEntry(epoch=0, timestamp="", version=version(folder.path, 1)))
        for number, reward in ((0, 0.4), (1, 0.0)):
            measured = version(folder.path, number)
            metrics = {"avg_reward": reward}
            await log.add_validation(
                ValidationEntry(epoch=number, timestamp="", metrics=metrics, version=measured)
            )
    for wish in ("", "best"):
        chosen = choose_version(tmp_path / "r", wish)
        assert chosen.version is None
        assert "no trained version has done better" in chosen.choice


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
