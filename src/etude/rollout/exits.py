"""Code that would end the program: where it is an agent's or an evaluator's, it fails by itself."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine, Generator
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeAlias

from etude.core.errors import words_of
from etude.core.within import Within
from etude.rollout.loop_watch import BlockedLoop

Work: TypeAlias = Coroutine[Any, Any, Any] | Generator[Any, None, Any]

_whose: ContextVar[str] = ContextVar("whose")
"""Whose code runs here, as errors name it; also in tasks that this code starts."""

_HARMLESS = (Exception, asyncio.CancelledError, GeneratorExit, BlockedLoop)
"""All else that is raised would end the program."""


class ProcessExit(BaseException):
    """Raised in place of `os._exit`. No Exception, so that no retry loop catches it."""


class no_exit(Within[str]):
    """Within the block RuntimeError is raised in place of `os._exit` and of what is no Exception.

    Such as SystemExit and KeyboardInterrupt; cancellation goes through.

    It holds for tasks that are started in the block too, and `os._exit` raises in all threads meanwhile, but
    for what the main thread does outside of any block. A crash in native code and a signal end the process
    all the same.
    """

    __slots__ = ()

    def __init__(self, whose: str) -> None:
        super().__init__(_whose, whose)

    def __enter__(self) -> str:
        loop = asyncio.get_running_loop()
        if loop.get_task_factory() is None:
            loop.set_task_factory(_task)
        _exits.begin()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        super().__exit__(kind, error, trace)
        _exits.end()
        if error is not None and not isinstance(error, _HARMLESS):
            raise _error_of(self._value, error) from None


def _task(loop: asyncio.AbstractEventLoop, work: Work, **options: Any) -> asyncio.Task[Any]:
    """A task; one of an agent's does not stop the loop, as a task otherwise does that raises SystemExit."""
    whose = _whose.get(None)
    inner = work if whose is None else _contained(work, whose)
    return asyncio.Task(inner, loop=loop, **options)


async def _contained(work: Any, whose: str) -> Any:
    try:
        return await work
    except _HARMLESS:
        raise
    except BaseException as error:  # noqa: BLE001  all that is left would end the program
        raise _error_of(whose, error) from None


def _error_of(whose: str, error: BaseException) -> RuntimeError:
    return RuntimeError(f"{whose} raised {words_of(error)}").with_traceback(error.__traceback__)


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
        is_fork = os.getpid() != self._process
        is_programs_own = threading.current_thread() is threading.main_thread() and _whose.get(None) is None
        if is_fork or is_programs_own:  # A thread that hangs leaves its block open until the end.
            self._exit(status)
        raise ProcessExit(f"os._exit({status})")


_exits = _Exits()
