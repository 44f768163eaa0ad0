"""An agent and an evaluator that do to their process what an example says; `test_deeds.py` plays them.

Each deed is a function here: it raises, returns what nobody expects, or harms the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import etude


class Unspeakable(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("there is no text")


class Endless(Exception):
    """An error with a text of many megabytes."""

    def __str__(self) -> str:
        return "x" * 50_000_000


class Strange(BaseException):
    """No Exception, so that `except Exception` lets it pass."""


class Opaque:
    """A value that cannot be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("there is no repr")


def _raises(error: BaseException) -> Callable[[], NoReturn]:
    def deed() -> NoReturn:
        raise error

    return deed


def _cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


def _deep() -> Any:
    value: Any = "end"
    for _ in range(100_000):
        value = [value]
    return value


def _recursion() -> Any:
    return _recursion()


def _cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def _balloon() -> None:
    held = bytearray(3_000_000_000)
    held[::4096] = b"x" * len(held[::4096])
    time.sleep(60)


def _spin() -> None:
    while True:
        pass


def _thread_exits() -> None:
    thread = threading.Thread(target=os._exit, args=(0,))
    thread.start()
    thread.join()


def _close_outputs() -> None:
    sys.stdout.close()
    sys.stderr.close()
    os.close(1)
    os.close(2)


RAISED: dict[str, Callable[[], Any]] = {
    "ValueError": _raises(ValueError("as asked")),
    "an error without text": _raises(Unspeakable()),
    "an error of 50 MB": _raises(Endless()),
    "KeyboardInterrupt": _raises(KeyboardInterrupt()),
    "SystemExit 0": _raises(SystemExit(0)),
    "GeneratorExit": _raises(GeneratorExit()),
    "StopIteration": _raises(StopIteration(1)),
    "CancelledError": _raises(asyncio.CancelledError()),
    "MemoryError": _raises(MemoryError()),
    "a BaseException": _raises(Strange("no Exception")),
    "an ExceptionGroup": _raises(ExceptionGroup("several", [ValueError("a"), KeyError("b")])),
    "endless recursion": _recursion,
}

RETURNED: dict[str, Callable[[], Any]] = {
    "a cyclic list": _cyclic,
    "a list 100,000 deep": _deep,
    "a value that cannot be shown": Opaque,
    "a generator": lambda: (each for each in range(3)),
    "a coroutine": lambda: asyncio.sleep(0),
}

OUTPUTS: dict[str, Callable[[], Any]] = {
    "NaN": lambda: float("nan"),
    "infinity": lambda: float("inf"),
    "1e308": lambda: 1e308,
    "a lone surrogate": lambda: "\ud800",
}
"""Outputs like any other, and no scores."""

HARMLESS: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "bytes": lambda: b"\xff\x00",
    "an integer of 10,000 digits": lambda: 10**10_000,
    "60 MB of text": lambda: "y" * 60_000_000,
    "leaving its folder": lambda: os.chdir("/"),
    "an empty environment": os.environ.clear,
    "no garbage collection": gc.disable,
    "ignoring signals": lambda: [signal.signal(each, signal.SIG_IGN) for each in (2, 15, 23)],
    "fifty threads": lambda: [threading.Thread(target=time.sleep, args=(5,)).start() for _ in range(50)],
}
"""Deeds after which an episode may well be whole."""

DONE: dict[str, Callable[[], Any]] = {
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "os._exit in a thread": _thread_exits,
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "a crash in native code": lambda: ctypes.string_at(0),
    "abort": lambda: os.abort(),
    "3 GB of memory": _balloon,
    "an endless loop": _spin,
    "blocking in native code": lambda: time.sleep(600),
    "closing its outputs": _close_outputs,
    "a recursion limit of 30": lambda: sys.setrecursionlimit(30),
    "a stopped event loop": lambda: asyncio.get_running_loop().stop(),
    "cancelling all tasks": _cancel_all,
    "a closed event loop": lambda: asyncio.get_running_loop().close(),
}

DEEDS = RAISED | RETURNED | OUTPUTS | HARMLESS | DONE


def _do(example: etude.Example, who: str) -> Any:
    """The deed of the example, where it is `who`'s."""
    return DEEDS[str(example.inputs["deed"])]() if example.inputs["who"] == who else "fine"


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> Any:
    """Asks once, and then does it on the event loop."""
    await episode.chat([{"role": "user", "content": "hello"}])
    return _do(example, "agent")


@etude.workflow
def play_in_a_thread(example: etude.Example, episode: etude.Episode) -> Any:
    """Does it in a thread."""
    return _do(example, "agent")


@etude.evaluator
async def score(example: etude.Example, output: Any) -> Any:
    """Does it in place of scoring."""
    value = _do(example, "evaluator")
    return 0.5 if value == "fine" else value
