"""Code paths of a GPU, on a pretended device: in another process, since torch believes in it there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_nothing_mixes_devices():
    files = [str(TESTS / room / "on_a_device.py") for room in ("inference", "learner")]
    path = os.pathsep.join([str(TESTS.parent), str(TESTS.parent / "src")])
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            str(TESTS.parent),
            *files,
        ],
        cwd=TESTS.parent,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
