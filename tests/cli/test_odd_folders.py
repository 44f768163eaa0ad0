"""Run folders as kills, cuts and agents leave them: an honest sentence, and a way on."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from etude.core.errors import StoreError
from etude.store.run_folder import LOCK, RunFolder
from tests.cli.projects import ROOT, etude


def kill_at_first_database(project: Path) -> None:
    """Begin a run in a process that is killed as it makes `run.db`."""
    code = (
        "import os, signal, sys\n"
        "def hook(event, arguments):\n"
        "    if event in ('open', 'sqlite3.connect') and str(arguments[0]).endswith('run.db'):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.addaudithook(hook)\n"
        "from etude.store.run_folder import RunFolder\n"
        "RunFolder.create('runs', 'r', files={'config.yml': 'seed: 1\\n'})\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], cwd=project, check=False)
    assert killed.returncode == -signal.SIGKILL


def test_a_run_that_was_killed_before_it_had_a_journal_is_begun_again(project: Path) -> None:
    kill_at_first_database(project)
    assert (project / "runs" / "r" / LOCK).exists()
    refused = etude("resume", "r")
    assert refused.exit_code == 2, refused.output
    assert "run r was stopped before it had stored anything, so there is nothing to go on" in refused.output
    assert "Start it again: etude train CONFIG --name r" in refused.output
    begun = etude("train", "config.yml", "--name", "r")
    assert begun.exit_code == 0, begun.output


def test_a_database_in_which_nothing_is_yet_is_said_to_be_that(project: Path) -> None:
    RunFolder.create("runs", "r").close()
    (project / "runs" / "r" / "run.db").write_bytes(b"")
    with pytest.raises(StoreError, match="holds nothing: the run was stopped before it had stored anything"):
        RunFolder.read("runs/r")
    RunFolder.open("runs/r").close()
    RunFolder.read("runs/r").close()


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.98, None], ids=["empty", "half", "nearly all", "deleted"])
def test_a_config_that_is_not_whole_is_refused_and_without_one_the_journals_counts(
    project: Path, kept: float | None
) -> None:
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    config = project / "runs" / "r" / "config.yml"
    whole = config.read_text()
    if kept is None:
        config.unlink()
    else:
        config.write_text(whole[: int(kept * len(whole))])
    if kept is not None:
        refused = etude("resume", "r")
        assert refused.exit_code != 0
        assert "config.yml is damaged: config.yml is " in " ".join(refused.output.split())
        assert etude("runs", "check", "r").exit_code == 1
        config.unlink()
    assert etude("resume", "r").exit_code == 0
    assert etude("runs", "check", "r").exit_code == 0


def test_a_setting_that_was_flipped_is_not_gone_on_with(project: Path) -> None:
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    config = project / "runs" / "r" / "config.yml"
    config.write_text(config.read_text().replace("num_generations: 4", "num_generations: 5"))
    assert "config.yml is damaged: config.yml is not what was written" in etude("resume", "r").output


def test_changed_settings_stay_whole(project: Path) -> None:
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    assert etude("resume", "r", "-o", "finetuning.num_epochs=3").exit_code == 0
    assert etude("runs", "check", "r").exit_code == 0


def test_drafts_of_a_killed_process_are_gone_when_a_run_is_gone_on_with(project: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    assert etude("train", "config.yml", "--name", "r").exit_code == 0
    run = project / "runs" / "r"
    host = re.sub(r"[^\w-]", "-", socket.gethostname())
    writer = f"{host}.{gone.pid}"
    (run / f".summary.json.{writer}.part").write_text("{")
    (run / f".run.db.{writer}.part-wal").write_text("")
    assert etude("resume", "r").exit_code == 0
    assert not list(run.rglob("*.part*"))


def test_an_agent_that_goes_elsewhere_does_not_take_the_last_line_along(project: Path) -> None:
    agent = (project / "agent.py").read_text()
    away = ("import os, tempfile", "there = tempfile.mkdtemp()", "os.chdir(there)", "os.rmdir(there)", "")
    (project / "agent.py").write_text(agent.replace("reply = await", "\n    ".join(away) + "reply = await"))
    for words in (("train", "config.yml", "--name", "r"), ("resume", "r")):
        os.chdir(project)
        result = etude(*words)
        assert result.exit_code == 0, result.output
        assert result.output.splitlines()[-1] == "next: etude evaluate runs/r/config.yml --model runs/r"


@pytest.mark.parametrize(
    "delay", [0.1, *(pytest.param(delay, marks=pytest.mark.slow) for delay in (0.2, 0.4, 0.8, 1.2, 2.0))]
)
def test_ctrl_c_prints_no_traceback_however_early_it_comes(project: Path, delay: float) -> None:
    program = (
        "import os, signal, sys, threading\n"
        "sys.argv = ['etude', 'train', 'config.yml']\n"
        "from etude.cli import main\n"
        f"threading.Timer({delay}, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "main()\n"
    )
    search = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode in (130, -signal.SIGINT)
