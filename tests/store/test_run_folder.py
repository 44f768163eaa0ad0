"""The folder of a run, and which of its versions is meant."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import starmap
from pathlib import Path

import pytest
import yaml

from etude.core.errors import RequestError, StoreError
from etude.core.job import ModelVersion
from etude.store.facts import choose_version, find_run, list_runs, read_facts, run_version, stored_at
from etude.store.run_folder import RunFolder, git_state, new_run_name
from etude.store.stored_config import stored_data
from tests.show.histories import epoch, validation
from tests.view.stored import store_run

HOLD = """
import sys
from etude.store.run_folder import RunFolder
run = RunFolder.open(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


def hold(run: Path) -> subprocess.Popen[str]:
    """Another process that has the run open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def test_a_new_run_has_its_files(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "runs", "first", config="seed: 3\n", seed=3) as run:
        assert run.path == tmp_path / "runs" / "first"
        assert run.name == "first"
        assert run.checkpoints.is_dir()
        assert stored_data(run.path) == {"seed": 3} == yaml.safe_load((run.path / "config.yml").read_text())
        environment = run.read_json("environment.json")
    assert environment["seed"] == 3
    assert environment["python"].startswith("3.")
    about = [package.metadata for package in importlib.metadata.distributions()]
    assert environment["packages"] == {one["Name"]: one["Version"] for one in about if one["Name"]}


def test_the_environment_names_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_state(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "one"], check=True)
    state = git_state(tmp_path)
    assert state is not None and re.fullmatch("[0-9a-f]{40}", state["commit"]) and state["dirty"] is False
    (tmp_path / "file").write_text("2")
    changed = git_state(tmp_path)
    assert changed is not None and changed["dirty"] is True
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None, "a machine without git is fine"


def test_a_made_up_name_that_is_taken_gets_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.choice", lambda words: words[0])
    first = new_run_name(tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z]+-[a-z]+", first)
    (tmp_path / first).mkdir()
    assert new_run_name(tmp_path) == f"{first}-2"
    assert new_run_name(tmp_path, "evaluation-") == f"evaluation-{first}"
    (tmp_path / f"evaluation-{first}").mkdir()
    assert new_run_name(tmp_path, "evaluation-") == f"evaluation-{first}-2"


def test_a_run_is_never_made_over_another(tmp_path: Path) -> None:
    for name, config, told in (("a", "seed: 1\n", ".*: etude resume"), ("b", None, "choose another")):
        RunFolder.create(tmp_path, name, config=config).close()
        with pytest.raises(RequestError, match=f"exists; {told}"):
            RunFolder.create(tmp_path, name)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "data.txt").write_text("mine")
    with pytest.raises(RequestError, match=r"own exists.* no run"):
        RunFolder.create(tmp_path, "own")


@pytest.mark.parametrize("name", ["", " ", "..", "a/b", "a\\b", ".hidden", "a" * 201])
def test_a_name_must_make_one_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(RequestError, match=rf"^{re.escape(repr(name))} .* 200 letters"):
        RunFolder.create(tmp_path, name)


def test_an_output_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/a: .* writable"):
        RunFolder.create(tmp_path / "file", "a")


def test_what_is_no_run_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no run\.db.*`etude runs list`"):
        RunFolder.open(tmp_path / "a")


def test_a_run_is_found_where_an_empty_folder_here_has_its_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    RunFolder.create("runs", "a").close()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert find_run("a", Path("runs")) == tmp_path / "runs" / "a"
    with pytest.raises(RequestError, match=r"nothing .* --name b"):
        find_run("b", Path("runs"))
    with pytest.raises(RequestError, match=f"no run '{'x' * 300}'"):
        find_run("x" * 300, Path("runs"))


def test_one_process_at_a_time(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a").close()
    other = hold(tmp_path / "a")
    try:
        with pytest.raises(StoreError, match=f"run a .* process {other.pid};"):
            RunFolder.open(tmp_path / "a")
        assert [read_facts(run).in_use_by for run in list_runs(tmp_path)] == [other.pid]
        with RunFolder.read(tmp_path / "a") as reader:
            assert reader.journal.get("nothing") is None
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait()
    # The lock of a dead process is free, though its file and its process id are still there.
    with RunFolder.open(tmp_path / "a"), pytest.raises(StoreError, match=r"run a .* this process"):
        RunFolder.open(tmp_path / "a")


def test_a_run_in_a_folder_that_cannot_be_written_is_read() -> None:
    is_root, nobody = os.geteuid() == 0, 65534  # Root may write anywhere.
    with tempfile.TemporaryDirectory() as parent:
        RunFolder.create(parent, "a").close()
        for path in (Path(parent), *Path(parent).rglob("*")):
            path.chmod(0o555)
        if is_root:
            os.setresuid(nobody, nobody, 0)
        try:
            facts = [read_facts(run) for run in list_runs(Path(parent))]
        finally:
            if is_root:
                os.setresuid(0, 0, 0)
            for path in (Path(parent), *Path(parent).rglob("*")):
                path.chmod(0o755)
    assert [(run.in_use_by, run.problem) for run in facts] == [(None, None)]


def test_a_run_that_cannot_be_opened_is_not_left_locked(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "a").close()
    (tmp_path / "a" / "run.db").write_bytes(b"no database, but long enough to look at" * 30)
    for _ in range(2):
        with pytest.raises(StoreError, match="not a journal"):
            RunFolder.open(tmp_path / "a")


def test_reading_json_files(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, "a") as run:
        assert run.read_json("missing.json") is None
        (run.path / "broken.json").write_text("{")
        with pytest.raises(StoreError, match=r"broken\.json: cannot be read"):
            run.read_json("broken.json")


async def test_runs_are_listed_the_last_changed_first(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "nowhere") == []
    for age, name in ((30, "old"), (10, "new")):
        with RunFolder.create(tmp_path, name) as run:
            await run.journal.put("key", 1)
        stamp = 1_700_000_000 - age
        os.utime(tmp_path / name / "run.db", (stamp, stamp))
    (tmp_path / "no run").mkdir()
    RunFolder.read(tmp_path / "old").close()  # Which changes nothing.
    assert [run.name for run in list_runs(tmp_path)] == ["new", "old"]
    assert [read_facts(run).in_use_by for run in list_runs(tmp_path)] == [None, None]


def make_run(root: Path, rewards: Mapping[int, float], trained: Sequence[int]) -> Path:
    """A run that trained some versions, with the rewards of its validations by version."""
    epochs = [epoch(number - 1, None) for number in trained]
    return store_run(root, "r", epochs=epochs, validations=[*starmap(validation, rewards.items())])


@pytest.fixture
def trained_run(tmp_path):
    """Three versions, of which the second was the best and the first was not kept."""
    run = make_run(tmp_path, {1: 0.3, 2: 0.9, 3: 0.6}, [1, 2, 3])
    for number in (2, 3):
        (run / "checkpoints" / f"v{number}").mkdir(parents=True)
    return run


@pytest.mark.parametrize(
    ("wish", "number", "choice"),
    [
        ("", 2, ".* best .*"),
        ("best", 2, ".* best .*"),
        ("last", 3, ".* last .*"),
        *(("v3", 3, ""), ("2", 2, ""), ("base", 0, ""), ("v0", 0, "")),
    ],
)
def test_wishes(trained_run, wish, number, choice):
    chosen = choose_version(trained_run, wish)
    assert chosen.number == number and re.fullmatch(choice, chosen.choice)


@pytest.mark.parametrize(
    ("text", "shown"), [("r", "r:v2"), ("r:v3", "r:v3"), ("r:last", "r:v3"), ("r:base", "r:base")]
)
def test_runs_by_name_and_by_folder(trained_run, text, shown):
    assert str(run_version(text, trained_run.parent)) == shown
    assert str(run_version(str(trained_run.parent / text), Path("elsewhere"))) == shown


def test_where_no_version_was_measured_after_training_none_is_the_best(tmp_path):
    run = make_run(tmp_path, {}, [1])
    (run / "checkpoints" / "v1").mkdir(parents=True)
    with pytest.raises(RequestError, match=r"r:last .* v1\..*validation_dataset"):
        choose_version(run, "best")
    chosen = choose_version(run)
    assert chosen.number == 1 and re.search("last .* none .* measured", chosen.choice)


def test_the_base_model_is_the_best_where_training_made_it_worse(tmp_path):
    run = make_run(tmp_path, {0: 0.4, 1: 0.0}, [1])
    for wish in ("", "best"):
        chosen = choose_version(run, wish)
        assert chosen.version is None
        assert "base model" in chosen.choice


@pytest.mark.parametrize("text", ["Qwen/Qwen3-0.6B", "./model", "gpt-4:latest", "runs"])
def test_other_names_are_no_runs(trained_run, text):
    assert run_version(text, trained_run.parent / "other") is None


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ("v9", "has no version v9; it has v1, v2, v3"),
        ("v1", "not kept; .* v2, v3.*`etude export`"),
        ("x", "'x' .* best, last, base"),
    ],
)
def test_versions_that_are_not_there(trained_run, wish, reason):
    with pytest.raises(RequestError, match=reason):
        choose_version(trained_run, wish)


def test_a_run_that_has_trained_nothing_yet(tmp_path):
    RunFolder.create(tmp_path, "new").close()
    with pytest.raises(RequestError, match=r"no trained version.*new:base"):
        choose_version(tmp_path / "new")


def test_weights_are_found_where_the_run_is_now(tmp_path):
    old = ModelVersion(number=3, location="/elsewhere/runs/r/checkpoints/prover/v3", digest="d")
    assert stored_at(tmp_path, old) == tmp_path / "checkpoints" / "prover" / "v3"
    remote = ModelVersion(number=3, location="ft:gpt-4:me", digest="d")
    assert stored_at(tmp_path, remote) is None
    assert json.loads(remote.model_dump_json())["location"] == "ft:gpt-4:me"
