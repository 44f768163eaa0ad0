"""Code that would end the program: where it is an agent's or an evaluator's, it fails by itself."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeAlias

from etude.core.errors import words_of
from etude.rollout.loop_watch import BlockedLoop

Work: TypeAlias = Coroutine[Any, Any, Any] | Generator[Any, None, Any]

_whose: ContextVar[str] = ContextVar("whose")
"""Whose code runs here, as errors name it; also in tasks that this code starts."""


class ProcessExit(BaseException):
    """Raised in place of `os._exit`. No Exception, so that no retry loop catches it."""


@contextmanager
def no_exit(whose: str) -> Iterator[None]:
    """Within the block RuntimeError is raised in place of `os._exit` and of what is no Exception.

    Such as SystemExit and KeyboardInterrupt; cancellation goes through.

    It holds for tasks that are started in the block too, and `os._exit` raises in all threads meanwhile. A
    crash in native code and a signal end the process all the same.
    """
    loop = asyncio.get_running_loop()
    if loop.get_task_factory() is None:
        loop.set_task_factory(_task)
    token = _whose.set(whose)
    _exits.begin()
    try:
        with _as_error(whose):
            yield
    finally:
        _exits.end()
        _whose.reset(token)


@contextmanager
def _as_error(whose: str) -> Iterator[None]:
    """Raise what would end the program as an error that names whose it is."""
    try:
        yield
    except (Exception, asyncio.CancelledError, GeneratorExit, BlockedLoop):
        raise
    except BaseException as error:  # noqa: BLE001  all that is left would end the program
        raise RuntimeError(f"{whose} raised {words_of(error)}").with_traceback(error.__traceback__) from None


def _task(loop: asyncio.AbstractEventLoop, work: Work, **options: Any) -> asyncio.Task[Any]:
    """A task; one of an agent's does not stop the loop, as a task otherwise does that raises SystemExit."""
    whose = _whose.get(None)
    inner = work if whose is None else _contained(work, whose)
    return asyncio.Task(inner, loop=loop, **options)


async def _contained(work: Any, whose: str) -> Any:
    with _as_error(whose):
        return await work


class _Exits:
    """`os._exit`, while any block is open."""

    def __init__(self) -> None:
        self._open = 0
        self._exit = os._exit
        self._process = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if not self._open:
                self._exit, self._process = os._exit, os.getpid()
                os._exit = self._refuse  # type: ignore[assignment]
            self._open += 1

    def end(self) -> None:
        with self._lock:
            self._open -= 1
            if not self._open:
                os._exit = self._exit

    def _refuse(self, status: int) -> None:
        if os.getpid() != self._process:
            self._exit(status)  # A fork of it has to end so.
        raise ProcessExit(f"os._exit({status})")


_exits = _Exits()
