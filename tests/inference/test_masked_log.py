"""Child processes: their logs are masked by lines, and a process group never goes on without its guard."""

from __future__ import annotations

import asyncio
import signal
import stat
import sys
from pathlib import Path

import pytest

from etude.inference.child_process import MaskedLines, MaskedLog, guard_of

SECRET = "canary-8fJ2kd93hQ"


async def printed(path: Path, code: str) -> tuple[bytes, int]:
    """The lines that a program with this code has left in its log, and where the log began."""
    with MaskedLog(path) as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", code, stdout=log.fileno(), stderr=log.fileno()
        )
    await asyncio.wait_for(process.wait(), 60)
    await log.settled()
    return await asyncio.to_thread(path.read_bytes), log.begin


async def test_secrets_are_masked_and_all_else_is_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    path = tmp_path / "child.log"
    path.write_bytes(b"before\n")
    code = """
import os, sys
os.write(1, b"key " + os.environ["SOME_API_KEY"][:5].encode())
os.write(1, os.environ["SOME_API_KEY"][5:].encode() + b" end\\n")
os.write(2, b"10 %\\r\\xff odd\\n" + b"no newline")
"""
    log, begin = await printed(path, code)
    assert log == b"before\nkey ********** end\n10 %\r\xff odd\nno newline"
    assert begin == 7


async def test_a_child_that_nobody_reads_goes_on(tmp_path: Path):
    """More than a pipe holds, while the event loop stands still."""
    with MaskedLog(tmp_path / "child.log") as log:
        code = "print('x' * 100, flush=True)\n" * 5000
        process = await asyncio.create_subprocess_exec(sys.executable, "-", stdin=-1, stdout=log.fileno())
    await asyncio.wait_for(process.communicate(code.encode()), 60)
    await log.settled()
    assert (tmp_path / "child.log").stat().st_size == 101 * 5000
    assert stat.S_IMODE((tmp_path / "child.log").stat().st_mode) == 0o600


def test_a_secret_in_two_pieces_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_API_KEY", SECRET)
    lines = MaskedLines()
    text = f"a {SECRET} b\nc {SECRET}".encode()
    pieces = [lines.add(text[index : index + 3]) for index in range(0, len(text), 3)]
    assert b"".join([*pieces, lines.end()]) == b"a ********** b\nc **********"


async def sleeper():
    return await asyncio.create_subprocess_exec("sleep", "3600", start_new_session=True)


async def test_a_group_whose_guard_is_given_up_is_killed():
    process = await sleeper()
    starting = asyncio.create_task(guard_of(process.pid))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL


async def test_a_guard_leaves_a_group_alone_until_it_is_let_go():
    process = await sleeper()
    guard = await guard_of(process.pid)
    await asyncio.sleep(0.2)
    assert process.returncode is None and guard.returncode is None
    assert guard.stdin is not None
    guard.stdin.close()
    assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL
    await guard.wait()
