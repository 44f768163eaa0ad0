"""Processes that tests start do not outlive them, and those that do are named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.forked import ROOT, Forked, program

LEAVES = """
import os, subprocess, sys, time

def test_it_leaves_a_fork():
    if (pid := os.fork()) == 0:
        time.sleep(600)
    print("left:", pid)

def test_it_leaves_a_process_with_another_environment():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(601)"], env={})
    print("left:", sleeper.pid)

def test_it_leaves_a_process(tmp_path):
    code = "import time; time.sleep(600)"
    sleeper = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, start_new_session=True)
    print("left:", sleeper.pid)

def test_it_ends_what_it_starts():
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


@pytest.mark.parametrize("workers", [0, 2])
def test_a_process_that_is_left_is_ended_and_named(tmp_path: Path, workers: int):
    (tmp_path / "test_leaves.py").write_text(LEAVES)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""}
    options = ["-q", "-rA", "-p", "tests.leftovers", "-p", "no:cacheprovider", "-n", str(workers)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), *options, str(tmp_path)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1, done.stdout
    # An error for each process of the tests that has left something.
    assert "4 passed, " in done.stdout and " error" in done.stdout
    assert "processes outlive the tests that started them" in done.stdout
    assert "time.sleep(600)" in done.stdout and "test_it_leaves_a_process" in done.stdout
    pids = {int(text.split()[0]) for text in done.stdout.split("left: ")[1:]}
    assert len(pids) == 3 and all(f"\n{pid}: " in done.stdout for pid in pids)
    assert all(map(gone, pids))


SLEEPS = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(600)"


def gone(pid: int) -> bool:
    for _ in range(100):
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_forked_command_ends_with_its_client(number: int, tmp_path: Path):
    command = [program() / "python", "-c", SLEEPS]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as client:
        assert client.stdout is not None
        pid = int(client.stdout.readline())
        client.send_signal(number)
        client.wait(60)
    assert gone(pid)


def test_a_forked_command_ends_with_whoever_holds_it(tmp_path: Path):
    command = Forked(["-c", SLEEPS], tmp_path, dict(os.environ), program="python")
    pid = int(command.stdout.readline())
    del command
    assert gone(pid)
