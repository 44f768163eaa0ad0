"""The wheel and the sdist, as users get them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_wheel_and_sdist_are_whole_and_run_in_a_fresh_environment(tmp_path: Path):
    environment = {**os.environ, "PYTHON": sys.executable}
    subprocess.run([ROOT / "tests" / "package.sh", tmp_path], env=environment, check=True)
