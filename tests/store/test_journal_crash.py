"""The journal after its process or its disk gives up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from etude.store.journal import Journal

WRITER = """
import asyncio, sys
from etude.store.journal import Journal

async def main():
    journal = Journal(sys.argv[1])
    async def worker(name):
        for count in range(10**9):
            key = f"{name}/{count}"
            async def fn():
                journal.put_soon(f"sum/{name}", lambda: {"count": count})
                return count
            await journal.step(key, fn)
            print(key, flush=True)
    await asyncio.gather(*(worker(index) for index in range(8)))

asyncio.run(main())
"""

FULL_DISK = """
import asyncio, resource, sys
from etude.core.errors import StoreError
from etude.store.journal import Journal

async def main():
    journal = Journal(sys.argv[1])
    # The system refuses to let a file grow beyond this: what a full disk looks like to SQLite.
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
    async def put(index):
        await journal.put(str(index), "x" * 4000)
        print("kept", index, flush=True)
    for start in range(0, 10000, 10):
        outcomes = await asyncio.gather(*(put(start + i) for i in range(10)), return_exceptions=True)
        failed = [outcome for outcome in outcomes if outcome is not None]
        if failed:
            assert all(isinstance(outcome, StoreError) for outcome in failed), failed
            print("failed", len(failed), failed[0], flush=True)
            return

asyncio.run(main())
"""


@pytest.mark.parametrize("seed", range(4))
def test_every_acknowledged_step_survives_kill_9(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "run.db"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    seen = [process.stdout.readline().strip()]
    deadline = time.monotonic() + random.Random(seed).uniform(0.0, 0.3)
    while len(seen) < 2 or time.monotonic() < deadline:
        seen.append(process.stdout.readline().strip())
    os.kill(process.pid, signal.SIGKILL)
    seen += [line.strip() for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    process.wait()
    with Journal(path) as journal:
        kept = dict(journal.scan())
    assert len(seen) > 1
    assert all(kept[key] == int(key.split("/")[1]) for key in seen)
    sums = {key.removeprefix("sum/"): kept.pop(key)["count"] for key in list(kept) if key.startswith("sum/")}
    assert all(sums[key.split("/")[0]] >= count for key, count in kept.items()), "counted before it was kept"


def test_a_full_disk_fails_every_waiter_and_keeps_what_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "run.db"
    answer = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = answer.stdout.splitlines()
    kept = [line.split()[1] for line in lines if line.startswith("kept")]
    assert len(kept) > 10
    assert lines[-1].startswith("failed 10 "), lines[-1]
    assert "run.db" in lines[-1] and "free some space and resume" in lines[-1]
    with Journal(path) as journal:
        assert {key for key, _ in journal.scan()} == set(kept)
