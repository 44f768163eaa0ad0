"""Logs stay short, and say what they lack."""

from __future__ import annotations

import asyncio
from pathlib import Path

from etude.cluster.runners import Output
from etude.runners.process import bound_log


def test_a_long_log_begins_anew_while_it_is_written_to(tmp_path: Path):
    path = tmp_path / "1.log"
    with path.open("ab", buffering=0) as log:
        log.write(b"old" * 100)
        bound_log(path, 1000)
        assert path.read_bytes() == b"old" * 100
        bound_log(path, 200)
        log.write(b"new")
    assert (tmp_path / "1.log.before").read_bytes() == b"old" * 100
    assert path.read_bytes() == b"[etude: the log had more than 200 bytes; 1.log.before has them]\nnew"
    bound_log(tmp_path / "missing.log")


async def test_output_that_nobody_fetches_is_dropped_and_counted():
    output = Output(most=100_000)
    waiting = asyncio.ensure_future(output.take(wait=True))
    await asyncio.sleep(0)
    output.data_received(b"first")
    assert await waiting == b"first"
    output.data_received(b"a" * 90_000)
    output.data_received(b"b" * 40_000)
    pieces = [await output.take(wait=False) for _ in range(3)]
    assert pieces[0].startswith(b"[etude: 30000 bytes of output are missing here")
    assert sum(map(len, pieces)) - len(pieces[0].splitlines()[0]) - 1 == 100_000
    assert pieces[2] == b""
