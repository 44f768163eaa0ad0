"""Functions that may block, threads of which nobody knows when they end; and how an extra is installed."""

import asyncio
import contextlib
import json
import re
import sys
import threading
from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace

import pytest

from etude.core import errors, threads
from etude.core.errors import LoopStopped, MissingExtraError
from etude.core.threads import call_in_thread, run_loop


async def test_functions_that_block_do_so_at_the_same_time_in_the_callers_context():
    barrier, who = threading.Barrier(20, timeout=60), ContextVar("who", default=0)

    async def call(number: int) -> int:
        who.set(number)
        return await call_in_thread(lambda: (barrier.wait(), who.get())[1])

    assert await asyncio.gather(*map(call, range(20))) == [*range(20)]


def leave() -> None:
    sys.exit(3)


def stop_iteration() -> None:
    raise StopIteration("odd")


def cancel() -> None:
    raise asyncio.CancelledError


def fail() -> None:
    raise ValueError("as told")


@pytest.mark.parametrize(
    ("deed", "kind", "words"),
    [
        (leave, RuntimeError, "SystemExit: 3"),
        (stop_iteration, RuntimeError, "StopIteration"),
        (cancel, RuntimeError, "CancelledError"),
        (fail, ValueError, "as told"),
    ],
)
async def test_what_it_raises_is_an_error_where_it_is_awaited(
    deed: Callable[[], None], kind: type[BaseException], words: str
):
    with pytest.raises(kind, match=words):
        await call_in_thread(deed)


@pytest.mark.parametrize("is_told", [True, False])
async def test_one_that_does_not_end_is_left_to_itself(monkeypatch: pytest.MonkeyPatch, is_told: bool):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.01)
    release, told = threading.Event(), threading.Event()
    call = call_in_thread(release.wait, told.set if is_told else None)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(call, 0.01)
    assert told.is_set() is is_told
    release.set()


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"url": "file:///home/me/my%20etude", "dir_info": {"editable": True}},
            "pip install -e '/home/me/my etude[plots]'",
        ),
        ({"url": "file:///src/etude", "dir_info": {}}, "pip install '/src/etude[plots]'"),
        (
            {"url": "file:///tmp/etude-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install '/tmp/etude-0.1.0-py3-none-any.whl[plots]'",
        ),
        (None, "pip install 'etude[plots]'"),
    ],
)
def test_it_names_what_etude_was_installed_from(monkeypatch, origin, command):
    text = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(errors, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert errors.install_command("plots") == command
    assert command in str(MissingExtraError("a picture", "plots"))


def test_sys_exit_in_a_program_is_an_error():
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        run_loop(asyncio.to_thread(leave))


async def _poll_forever():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def _fail():
    raise KeyError("mine")


def test_the_end_waits_for_no_task_that_was_left_behind_and_names_each(caplog, monkeypatch):
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.05)
    leaked: list[asyncio.Task[None]] = []

    async def leave_a_task() -> str:
        leaked.append(asyncio.ensure_future(_poll_forever()))
        asyncio.gather(_fail())
        await asyncio.sleep(0.01)
        return "done"

    assert run_loop(leave_a_task()) == "done"
    assert f"the task _poll_forever at {__file__}:" in caplog.text
    assert re.search(rf"{__file__}:\d+: KeyError: 'mine'", caplog.text)
    assert "Traceback" not in caplog.text


async def _stop_the_loop():
    asyncio.get_running_loop().stop()
    await asyncio.sleep(3600)


async def _cancel_all_tasks():
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(3600)


@pytest.mark.parametrize("stop", [_stop_the_loop, _cancel_all_tasks])
def test_code_that_stops_the_loop_is_named_as_the_cause(stop):
    with pytest.raises(LoopStopped, match="etude resume"):
        run_loop(stop())


def test_errors_of_the_work_itself_pass_the_loop():
    async def fail() -> None:
        raise RuntimeError("its own")

    with pytest.raises(RuntimeError, match="its own"):
        run_loop(fail())
