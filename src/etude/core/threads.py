"""Code that may block, run in threads: functions, and coroutines on event loops of their own.

A thread whose code does not end when it was told to is given up: it is counted as long as it runs, and the
code in it is interrupted at its next step in Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import threading
from collections.abc import Callable, Coroutine, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from etude.core.errors import words_of

T = TypeVar("T")
Work: TypeAlias = Callable[[], Coroutine[Any, Any, T]]
Runner: TypeAlias = Callable[[Work[Any]], Coroutine[Any, Any, Any]]

_apart: contextvars.ContextVar[Runner | None] = contextvars.ContextVar("apart", default=None)
"""Runs coroutines of this context's code, where the running loop is not to."""

GRACE_SECONDS = 1.0
"""How long code that was told to stop may take to clean up, before it is left to itself."""

_IDLE_SECONDS = 10.0
_idle: list[SimpleQueue[Job]] = []
"""The queues of threads that have nothing to do; a thread that is not used for a while ends."""
_left: set[ThreadCall[Any]] = set()
"""Calls that nobody waits for any more; their threads may still run."""


class Job(Protocol):
    """Anything that a thread does."""

    is_given_up: bool
    """Whether the thread is to end afterwards."""

    def run(self) -> None:
        """Do it, in the thread."""


class GivenUp(BaseException):
    """Raised in code whose thread was given up. No Exception, so that no retry loop catches it."""


class ThreadCall(Generic[T]):
    """A call of a function in a daemon thread, with the context of whoever makes it.

    Unlike in an executor there are as many threads as there are calls at once, and they are daemons: a
    function that hangs holds up neither the calls after it nor the end of the program.
    """

    def __init__(self, fn: Callable[[], T]) -> None:
        self._fn = fn
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._done: asyncio.Future[tuple[Any, BaseException | None]] = self._loop.create_future()
        self.settle: Callable[[Callable[[], None]], object] = self._loop.call_soon_threadsafe
        """Has the event loop call a function."""
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        """The one that is in the function now."""
        self._is_over = False
        self.is_given_up = False
        """Whether its thread was given up."""

    async def result(
        self, stop: Callable[[], None] | None = None, start: Callable[[ThreadCall[T]], object] | None = None
    ) -> T:
        """The function's result; to be awaited once. A cancelled call is left to itself.

        `start` has it run by some thread, by default one of its own.

        Where `stop` is given, that is called first, and the function has a moment to end; if it does not, its
        thread is given up. Raises what the function raises, and RuntimeError for what would end the program.
        """
        (start or run_in_thread)(self)
        try:
            result, error = await self._done
        except asyncio.CancelledError:
            if self._done.cancelled():
                self._done = self._loop.create_future()
            if stop is not None:
                stop()
                await self._given_up()
            with self._lock:
                if not self._is_over:
                    _left.add(self)
            raise
        if isinstance(error, asyncio.CancelledError):
            raise error
        if error is not None and (isinstance(error, StopIteration) or not isinstance(error, Exception)):
            # Raised there it means that code, not the program; and no future can hold a StopIteration.
            message = f"the function raised {words_of(error)}"
            raise RuntimeError(message).with_traceback(error.__traceback__)
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    async def _given_up(self) -> None:
        """Wait a moment for the function to end, and give its thread up if it does not."""
        try:
            await asyncio.wait({self._done}, timeout=GRACE_SECONDS)
        finally:
            with self._lock:
                if not self._is_over:
                    self.is_given_up = True
                    if self._thread is not None and self._thread.ident is not None:
                        number = ctypes.c_ulong(self._thread.ident)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(GivenUp))

    @property
    def is_running(self) -> bool:
        """Whether a thread is in the function."""
        return self._thread is not None and self._thread.is_alive()

    def run(self) -> None:
        """Call the function in this thread, and tell whoever waits."""
        with self._lock:
            if self.is_given_up:
                return
            self._thread = threading.current_thread()
        result = error = None
        try:
            result = self._context.run(self._fn)
        except BaseException as raised:  # noqa: BLE001  user code; raised again where it is awaited
            error = raised
        with self._lock:
            self._thread, self._is_over = None, True
        # The loop is closed when the program has gone on without this thread.
        with contextlib.suppress(RuntimeError):
            self.settle(lambda: self._settle(result, error))

    def _settle(self, *outcome: Any) -> None:
        if not self._done.done():
            self._done.set_result(outcome)


async def call_in_thread(fn: Callable[[], T], stop: Callable[[], None] | None = None) -> T:
    """The result of `fn`, run in a thread; cancelling this and errors are as in `ThreadCall.result`."""
    return await ThreadCall(fn).result(stop)


def threads_left() -> int:
    """The threads that still run code that nobody waits for any more."""
    _left.intersection_update([call for call in tuple(_left) if call.is_running])
    return len(_left)


class OwnLoop(Generic[T]):
    """A coroutine on an event loop of its own: called in a thread, it runs it to its end."""

    def __init__(self, work: Work[T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._stop: Callable[[], None] | None = None
        self._is_stopped = False

    def __call__(self) -> T:
        loop = asyncio.new_event_loop()
        try:
            asyncio.set_event_loop(loop)
            task = loop.create_task(_with_runner(self._work, lambda work: _on_loop(loop, work)))
            with self._lock:
                self._stop = lambda: _call_on(loop, task.cancel)
                if self._is_stopped:
                    task.cancel()
            return loop.run_until_complete(task)
        finally:
            _close(loop)

    def stop(self) -> None:
        """Cancel the coroutine, from another thread."""
        with self._lock:
            self._is_stopped = True
            if self._stop is not None:
                self._stop()


async def on_own_loop(work: Work[T]) -> T:
    """The result of a coroutine that runs in a thread, on an event loop of its own.

    When this is cancelled, so is that; where it does not end, its thread is given up. Raises as `ThreadCall`.
    """
    own = OwnLoop(work)
    return await ThreadCall(own).result(own.stop)


async def apart(work: Work[T]) -> T:
    """The result of a coroutine of the user's, run where the code of its episode runs.

    That is the running loop, or the episode's own; or one for this coroutine alone, where the episode has a
    thread and no loop.
    """
    run = _apart.get()
    return await (work() if run is None else run(work))


@contextlib.contextmanager
def running_apart(run: Runner = on_own_loop) -> Iterator[None]:
    """Have `apart` use `run` within the block, also where its code has others work for it."""
    token = _apart.set(run)
    try:
        yield
    finally:
        _apart.reset(token)


async def _with_runner(work: Work[T], run: Runner) -> T:
    with running_apart(run):
        return await work()


async def _on_loop(loop: asyncio.AbstractEventLoop, work: Work[T]) -> T:
    return await on_loop(loop, work())


async def on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that runs on `loop`, whichever loop this is called on."""
    if asyncio.get_running_loop() is loop:
        return await work
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


def _call_on(loop: asyncio.AbstractEventLoop, fn: Callable[[], object]) -> None:
    with contextlib.suppress(RuntimeError):  # It is closed.
        loop.call_soon_threadsafe(fn)


async def _close_generators(loop: asyncio.AbstractEventLoop) -> None:
    async with asyncio.timeout(GRACE_SECONDS):
        await loop.shutdown_asyncgens()


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Close a loop and what is left on it, as far as that takes no longer than the grace."""
    try:
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.wait(tasks, timeout=GRACE_SECONDS))
        loop.run_until_complete(_close_generators(loop))
    except (RuntimeError, TimeoutError):
        pass  # It was stopped by its own code, or something on it does not end.
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def run_in_thread(job: Job) -> None:
    """Have an idle thread do it, or a new one."""
    try:
        queue = _idle.pop()
    except IndexError:
        queue = SimpleQueue()
        threading.Thread(target=_work, args=(queue,), name="etude-user-code", daemon=True).start()
    queue.put(job)


def _work(queue: SimpleQueue[Job]) -> None:
    with contextlib.suppress(GivenUp):
        while True:
            try:
                job = queue.get(timeout=_IDLE_SECONDS)
            except Empty:
                try:
                    _idle.remove(queue)
                except ValueError:
                    continue  # The queue was taken this moment: a call is on its way.
                return
            job.run()
            if job.is_given_up:
                return  # The interruption may still be on its way.
            del job  # Or it would keep its arguments alive until the next one.
            _idle.append(queue)
