"""Run folders as kills, cuts and agents leave them: an honest sentence, and a way on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.store.run_folder import LOCK
from tests.cli.projects import etude


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
