"""A plain script of OpenPipe ART, with the real package, trains on the server.

Skipped where the extra `art` is not installed. ETUDE_TEST_ART names another Python that has it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.server.process import ServerProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON = os.environ.get("ETUDE_TEST_ART", sys.executable)
STEPS = 8

pytestmark = pytest.mark.art


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "ETUDE_TEST_ART" not in os.environ:
        pytest.importorskip("art", reason="needs the extra 'art': pip install '.[art]'")
    folder = tmp_path_factory.mktemp("base")
    program = EXAMPLES / "sort" / "base.py"
    subprocess.run([sys.executable, program, "--out", folder], check=True, stdout=subprocess.DEVNULL)
    return folder / "model"


def run(server: ServerProcess, folder: Path, steps: int) -> list[tuple[int, float]]:
    """Runs the script up to a step; the steps that it took, and their rewards."""
    done = subprocess.run(
        [PYTHON, EXAMPLES / "art" / "train.py", str(steps)],
        cwd=folder,
        env=os.environ | {"ART_SERVER": server.address},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = re.findall(r"^step (\d+): reward ([\d.]+)$", done.stdout, flags=re.MULTILINE)
    return [(int(step), float(reward)) for step, reward in found]


def test_its_rewards_rise_and_it_goes_on_where_it_was(base: Path, tmp_path: Path) -> None:
    with ServerProcess(base, tmp_path, "--name", "sorter") as server:
        first = run(server, tmp_path, STEPS // 2)
        second = run(server, tmp_path, STEPS)
        names = [one["id"] for one in httpx.get(f"{server.address}/v1/models").json()["data"]]
    assert [step for step, _ in first + second] == list(range(STEPS))
    rewards = [reward for _, reward in first + second]
    assert sum(rewards[-2:]) > sum(rewards[:2]) + 0.1, rewards
    assert [f"sorter-1@{step}" in names for step in range(STEPS + 1)] == [True] * (STEPS + 1)
