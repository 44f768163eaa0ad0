"""Stored weights and run folders that are not as they were written: a run goes back, or says so."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etude.engines.embedded import EmbeddedEngine
from etude.store.files import SUMS
from etude.store.histories import read_histories
from etude.store.run_folder import LOCK
from tests.cli.killed import repeatable_project
from tests.cli.projects import etude, fail, succeed
from tests.support import one_quick, without_times


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.fixture(scope="module")
def after_run(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Path:
    """A project with a deterministic run that is over: v1, v2, v3."""
    folder = tmp_path_factory.mktemp("trained")
    repeatable_project(folder, base)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        succeed("train", "config.yml", "--name", "run")
    return folder


@pytest.fixture
def run(after_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the current folder."""
    shutil.copytree(after_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs" / "run"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The model calls that are made."""
    made, complete = [], EmbeddedEngine.complete

    async def count(self: EmbeddedEngine, request: Any) -> Any:
        made.append(request.conversation)
        return await complete(self, request)

    monkeypatch.setattr(EmbeddedEngine, "complete", count)
    return made


def versions(run: Path) -> dict[str, bytes]:
    """The files of all versions that count."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in sorted((run / "checkpoints").glob("v?/*"))
        if path.suffix == ".safetensors"
    }


def history(run: Path) -> Any:
    """All that the run has recorded, but for times and places."""
    history = read_histories(run)[None].model_dump(mode="json", exclude={"recoveries"})
    return without_times(json.loads(json.dumps(history, default=str)), "location")


def require_undisturbed(run: Path, trained: Path) -> None:
    """The run has what it had before it was damaged."""
    assert versions(run) == versions(trained / "runs" / "run")
    assert history(run) == history(trained / "runs" / "run")


@pytest.mark.parametrize(
    ("name", "harm"),
    one_quick(("trained.safetensors", flip), ("job.json", empty), ("optimiser.safetensors", Path.unlink)),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_run_goes_back_from_a_damaged_version(
    run: Path, after_run: Path, calls: list[str], name: str, harm: Callable[[Path], None]
) -> None:
    harm(run / "checkpoints" / "v3" / name)
    result = succeed("resume", "run")
    assert f"not written: v3/{name}" in result.output
    assert "back to version 2: epoch 3 will" in " ".join(result.output.split())
    assert not calls
    require_undisturbed(run, after_run)
    (recovery,) = read_histories(run)[None].recoveries
    assert [version.number for version in recovery.lost] == [3]
    assert (run / "checkpoints" / "v3.set-aside-1").is_dir()


def test_without_any_whole_version_training_begins_anew(run: Path, after_run: Path, calls: list[str]) -> None:
    shutil.rmtree(run / "checkpoints" / "v3")
    os.truncate(run / "checkpoints" / "v2" / "optimiser.safetensors", 1000)
    empty(run / "checkpoints" / "v1" / SUMS)
    shown = " ".join(succeed("resume", "run").output.split())
    assert "v1/SHA256SUMS is not" in shown and "; v2/optimiser.safetensors is not" in shown
    assert "began with: epochs 1 to 3 will" in shown
    assert not calls
    require_undisturbed(run, after_run)


def test_a_renamed_run_makes_its_lost_versions_again(run: Path, after_run: Path, calls: list[str]) -> None:
    """Its jobs keep the name that it began with, so their versions get the same numbers."""
    moved = run.rename(run.with_name("moved"))
    shutil.rmtree(moved / "checkpoints" / "v3")
    shutil.rmtree(moved / "checkpoints" / "v2")
    succeed("resume", "moved")
    assert not calls
    assert versions(moved) == versions(after_run / "runs" / "run")


def test_check_names_each_file_and_the_next_resume_mends_it(
    run: Path, after_run: Path, calls: list[str]
) -> None:
    assert "versions are whole" in succeed("runs", "check", "run").output
    flip(run / "checkpoints" / "v3" / "learner.json")
    empty(run / "checkpoints" / "v1" / "trained.safetensors")
    found = fail("runs", "check", "run", code=1)
    shown = " ".join(found.output.split())
    assert "v1/trained.safetensors is empty; v3/learner.json is not" in shown
    assert found.output.splitlines()[-1] == "next: etude resume runs/run"
    facts = json.loads(etude("runs", "check", "run", "--json").output)
    assert facts["damage"] == []
    assert [clause.split()[0] for clause in facts["files"]] == ["v1/trained.safetensors", "v3/learner.json"]
    assert etude("resume", "run").exit_code == 0
    assert not calls
    shutil.rmtree(run / "checkpoints" / "v1")
    shutil.copytree(after_run / "runs" / "run" / "checkpoints" / "v1", run / "checkpoints" / "v1")
    require_undisturbed(run, after_run)


def test_a_damaged_version_is_not_evaluated_and_its_export_trains_it_again(
    run: Path, calls: list[str]
) -> None:
    whole = succeed("export", "run", "--version", "v2", "--out", "whole") and Path("whole/model.safetensors")
    flip(run / "checkpoints" / "v2" / "trained.safetensors")
    refused = etude("evaluate", "config.yml", "--model", "run:v2")
    assert refused.exit_code == 2 and "v2 is damaged: v2/trained.safetensors is not" in refused.output
    advice = refused.output.strip().partition("by: etude ")[2].split()
    shown = succeed(*advice).output
    assert "v2/trained.safetensors is not what was written; it is trained again" in " ".join(shown.split())
    assert (run / "export/v2/model.safetensors").read_bytes() == whole.read_bytes() and not calls


@pytest.mark.slow
def test_whatever_byte_of_a_run_is_flipped_it_ends_as_if_it_had_not_been_or_is_refused(
    run: Path, after_run: Path, tmp_path: Path
) -> None:
    """The journal, the config, and all files of the newest version."""
    chance, ends = random.Random(0), []
    paths = [run / "run.db", run / "config.yml", *(run / "checkpoints" / "v3").iterdir()]
    names = [str(path.relative_to(run)) for path in paths]
    for number in range(60):
        other = Path(shutil.copytree(run, tmp_path / f"other-{number}" / "run"))
        path = other / names[number % len(names)]
        content = bytearray(path.read_bytes())
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        result = etude("resume", other)
        ends.append(result.exit_code)
        if result.exit_code == 0:
            require_undisturbed(other, after_run)
        else:
            assert "is damaged" in result.output or "run's database" in result.output, result.output
        shutil.rmtree(other)
    assert ends.count(0) > 30
    assert ends.count(1) > 5


def kill_at_first_database(project: Path) -> None:
    """Begin a run in a process that is killed as it makes `run.db`."""
    code = (
        "import os, signal, sys\n"
        "def hook(event, arguments):\n"
        "    if event in ('open', 'sqlite3.connect') and 'run.db' in str(arguments[0]):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(hook)\n"
        "from etude.store.run_folder import RunFolder\n"
        "RunFolder.create('runs', 'r', config='seed: 1\\n')\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=project, check=False)
    assert killed.returncode == -signal.SIGKILL


def test_a_run_that_was_killed_before_it_had_a_journal_is_begun_again(project: Path) -> None:
    kill_at_first_database(project)
    assert (project / "runs" / "r" / LOCK).exists()
    refused = fail("resume", "r")
    assert "nothing to continue" in refused.output
    assert "again as before, with --name r" in refused.output
    succeed("train", "config.yml", "--name", "r")


def test_what_happens_to_the_copy_of_the_config_changes_nothing(project: Path) -> None:
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    for text in ("", "finetuning: {num_epochs: 9}"):
        (project / "runs" / "r" / "config.yml").write_text(text)
        assert etude("resume", "r").exit_code == 0
        assert etude("runs", "check", "r").exit_code == 0
