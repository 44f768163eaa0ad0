"""The threads that torch computes with on a CPU."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from etude.models.device import release_threads


def count_threads(most: int = 0) -> int:
    """Return the number of this process's threads. Wait a moment until there are at most `most`."""
    for _ in range(100):
        count = len([*Path("/proc/self/task").iterdir()])
        if not most or count <= most:
            break
        time.sleep(0.05)
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_released_threads_end() -> None:
    def compute() -> None:
        before, x = count_threads(), torch.ones(1 << 20)
        for _ in range(2):
            assert float((x + x).sum()) == 2 << 20
            assert count_threads() > before
            release_threads()
            assert count_threads(before) == before

    usual = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(compute).result()
    finally:
        torch.set_num_threads(usual)
