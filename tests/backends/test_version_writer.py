"""Versions that are written beside the run: the last one always, the best one, and one every so often."""

import json
import shutil
import sqlite3
import threading
from pathlib import Path

import pytest

from etude.backends.state_folders import MadeVersion, StateFolders, VersionWriter
from etude.core.errors import StoreError
from etude.learner.learner import Learner, LearnerOptions
from etude.models.weights import digest, load_tensors
from etude.store.files import WEIGHTS_FILE
from tests.cli.conftest import base as base
from tests.cli.killed import killed_after, repeatable_project
from tests.cli.projects import change, etude, run_to_end, succeed
from tests.cli.test_damaged_versions import calls as calls
from tests.models.tiny_models import change_weights, fresh_policy

NEVER = 1e9


def made_by(learner: Learner, number: int) -> MadeVersion:
    return MadeVersion(number, {"job": f"job-{number}"}, learner.snapshot())


def take_step(learner: Learner) -> None:
    """Change the weights in place, as a step does."""
    change_weights(learner.policy, lambda one: one.add_(0.01))


@pytest.fixture
def learner() -> Learner:
    return Learner(fresh_policy(), LearnerOptions())


@pytest.mark.parametrize(
    ("large", "seconds", "written"), [(False, None, [1, 2, 3]), (True, None, [2, 3]), (False, NEVER, [2, 3])]
)
def test_a_large_version_is_written_when_it_is_the_best_and_at_the_end(
    tmp_path: Path,
    learner: Learner,
    monkeypatch: pytest.MonkeyPatch,
    large: bool,
    seconds: float | None,
    written: list[int],
) -> None:
    monkeypatch.setattr("etude.backends.state_folders._LARGE", 0 if large else 10**9)
    versions = StateFolders(tmp_path, "v", "version")
    writer = VersionWriter(versions, seconds)
    for number in (1, 2, 3):
        writer.drop()
        take_step(learner)
        made = writer.add(made_by(learner, number), at_once=False)
        assert (made is None) == (1 not in written)
        assert made is None or made.digest == digest(learner.policy.trainable())
        if number == 2:
            writer.write_behind()
    writer.close()
    assert versions.numbers() == written


def test_what_is_written_behind_is_what_it_was(tmp_path: Path, learner: Learner) -> None:
    """The next step begins before the version is on the disk."""
    versions, may_go_on = StateFolders(tmp_path, "v", "version"), threading.Event()
    made, before = made_by(learner, 1), learner.policy.digest()
    writer = VersionWriter(versions, NEVER)
    writer._thread.submit(may_go_on.wait, 30)
    writer.add(made, at_once=False)
    writer.write_behind()
    writer.drop()
    take_step(learner)
    assert not versions.numbers()
    may_go_on.set()
    writer.close()
    assert (
        digest(load_tensors(versions.folder(1) / WEIGHTS_FILE))
        == before
        != digest(learner.policy.trainable())
    )


def test_without_room_for_a_copy_it_is_written_in_place(
    tmp_path: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("etude.backends.state_folders.available_memory", lambda: 1)
    versions = StateFolders(tmp_path, "v", "version")
    writer = VersionWriter(versions, 1e-9)
    writer.add(made_by(learner, 1), at_once=False)
    assert versions.damage(1) == []
    assert "version 1 is written" in caplog.text and "no room" in caplog.text


def test_a_disk_that_refuses_is_an_error_of_the_next_call(tmp_path: Path, learner: Learner) -> None:
    (tmp_path / "checkpoints").write_text("no folder")
    writer = VersionWriter(StateFolders(tmp_path / "checkpoints", "v", "version"), 1e-9)
    writer.add(made_by(learner, 1), at_once=False)
    with pytest.raises(StoreError, match="cannot save version 1"):
        writer.close()


@pytest.fixture
def project(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a run of four epochs that writes nothing by the clock."""
    monkeypatch.chdir(repeatable_project(tmp_path, base))
    changes = {"storage": None, "finetuning__num_epochs": 4}
    change(tmp_path / "config.yml", trainer_adapters__local__checkpoint_seconds=NEVER, **changes)
    return tmp_path


def test_a_run_has_its_best_and_its_last_version_on_the_disk_and_exports_any(
    project: Path, calls: list[str]
) -> None:
    assert etude("train", "config.yml", "--name", "run").exit_code == 0
    run, played = project / "runs" / "run", len(calls)
    kept = {path.name for path in (run / "checkpoints").glob("v?")}
    shown = json.loads(etude("runs", "show", "run", "--json").stdout)["history"]
    rewards = {entry["version"]["number"]: entry["metrics"]["avg_reward"] for entry in shown["validations"]}
    best = {number for number in rewards if rewards[number] >= max(rewards[n] for n in range(number + 1))}
    assert kept == {f"v{number}" for number in best | {4} if number}
    exported = succeed("export", "run", "--version", "best", "--out", project / "best")
    versions = [entry["version"]["number"] for entry in shown["epochs"]]
    gone = next(number for number in versions if f"v{number}" not in kept)
    exported = succeed("export", "run", "--version", f"v{gone}")
    assert f"run:v{gone}: " in exported.stderr and "trained again" in exported.stderr
    assert len(calls) == played and "bit for bit" not in exported.stderr
    assert {path.name for path in (run / "checkpoints").glob("v?")} == kept
    assert [path.name for path in (run / "export").iterdir()] == [f"v{gone}"]
    assert (run / f"export/v{gone}/model.safetensors").is_file()


@pytest.mark.slow
def test_versions_that_were_not_written_are_made_again_of_what_was_sampled(
    project: Path, calls: list[str]
) -> None:
    change(project / "config.yml", finetuning__run_configuration__validation_dataset=None)
    lines = run_to_end("train", "config.yml", "--name", "whole", "--json", folder=project).stdout.splitlines()
    third = next(at for at, line in enumerate(lines, 1) if '"trained"' in line and '"epoch": 3' in line)
    assert killed_after(third, "train", "config.yml", "--name", "run", folder=project)
    run = project / "runs" / "run"
    assert not list((run / "checkpoints").glob("v?"))
    result = succeed("resume", "run")
    shown = " ".join(result.output.split())
    assert "were not written: v1 is missing; v2 is missing; v3 is missing" in shown
    assert "epochs 1 to 3 will be trained" in shown
    assert all("train/4" in conversation for conversation in calls)
    first, second = ((project / "runs" / name / "checkpoints/v4" / WEIGHTS_FILE) for name in ("whole", "run"))
    assert first.read_bytes() == second.read_bytes()


def test_a_version_whose_epoch_was_not_recorded_is_made_again_without_a_word(project: Path) -> None:
    """A process was killed after the version was adopted, and before the epoch was recorded."""
    changes = {"trainer_adapters__local__checkpoint_seconds": 0, "finetuning__num_epochs": 2}
    change(project / "config.yml", **changes)
    run_to_end("train", "config.yml", "--name", "run", folder=project)
    run = project / "runs" / "run"
    last = run / "checkpoints/v2" / WEIGHTS_FILE
    weights = last.read_bytes()
    shutil.rmtree(last.parent)
    with sqlite3.connect(run / "run.db") as database:
        cut = (
            "SELECT min(key) FROM steps WHERE key LIKE 'record/%' AND value LIKE '%EpochEntry%\"epoch\": 2,%'"
        )
        database.execute(f"DELETE FROM steps WHERE key LIKE 'record/%' AND key >= ({cut})")
    resumed = succeed("resume", "run")
    assert "trained again" not in resumed.output and last.read_bytes() == weights
