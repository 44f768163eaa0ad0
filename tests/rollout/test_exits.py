"""Code of an agent's that would end the program fails by itself, wherever it runs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from etude.rollout.exits import no_exit


def leave() -> None:
    sys.exit(3)


def interrupt() -> None:
    raise KeyboardInterrupt


def end() -> None:
    os._exit(0)


DEEDS = [(leave, "SystemExit: 3"), (interrupt, "KeyboardInterrupt"), (end, r"ProcessExit: os._exit\(0\)")]


@pytest.mark.parametrize(("deed", "words"), DEEDS)
async def test_in_the_block_it_is_an_error_of_the_code(deed: Callable[[], None], words: str):
    with pytest.raises(RuntimeError, match=f"^the workflow raised {words}"), no_exit("the workflow"):
        deed()


@pytest.mark.parametrize(("deed", "words"), DEEDS)
async def test_in_a_task_of_its_own_too(deed: Callable[[], None], words: str):
    async def later() -> None:
        await asyncio.sleep(0)
        deed()

    with no_exit("the workflow"):
        forgotten = asyncio.create_task(later())
        with pytest.raises(RuntimeError, match=f"^the workflow raised {words}"):
            await asyncio.gather(later(), asyncio.sleep(0.01))
    assert isinstance(forgotten.exception(), RuntimeError)


async def test_a_thread_of_its_own_ends_alone():
    errors: list[Any] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    try:
        with no_exit("the workflow"):
            thread = threading.Thread(target=end)
            thread.start()
            await asyncio.to_thread(thread.join, 10)
    finally:
        threading.excepthook = hook
    assert "os._exit(0)" in str(errors[0].exc_value)


async def test_afterwards_all_is_as_before_also_when_blocks_overlap():
    before = os._exit
    first, second = no_exit("the workflow"), no_exit("the evaluator")
    with first:
        second.__enter__()
    assert os._exit is not before
    second.__exit__(None, None, None)
    assert os._exit is before


async def test_a_forked_process_ends_as_it_wants():
    with no_exit("the workflow"):
        child = os.fork()
        if not child:
            os._exit(7)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", "import os; os._exit(8)"], check=False
        )
        assert done.returncode == 8


def test_a_block_that_stays_open_in_a_thread_does_not_keep_the_program_from_ending():
    program = """
import asyncio, os, threading
from etude.rollout.exits import no_exit

entered = threading.Event()

async def hang():
    with no_exit("the workflow"):
        entered.set()
        await asyncio.Event().wait()

threading.Thread(target=asyncio.run, args=[hang()], daemon=True).start()
entered.wait()
os._exit(5)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 5
