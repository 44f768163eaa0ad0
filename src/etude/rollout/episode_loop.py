"""The event loop that an episode lives on, for code of the episode that runs in other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from etude.core.errors import EpisodeError

P = ParamSpec("P")
T = TypeVar("T")


class EpisodeLoop:
    """Where the calls of an episode are made and recorded: its run's event loop.

    Whoever calls from another thread waits for that loop; when the episode is over, these calls raise
    EpisodeError.
    """

    def __init__(self, episode_id: str) -> None:
        self.loop = asyncio.get_running_loop()
        self._episode_id = episode_id
        self._thread = threading.get_ident()
        self._waiting: set[concurrent.futures.Future[Any]] = set()
        self._over = False

    @property
    def is_here(self) -> bool:
        """Whether this code runs on that loop's thread."""
        return threading.get_ident() == self._thread

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, run there, for coroutines of any loop."""
        if self.is_here:
            return await work
        with self._sent(work) as waiting:
            try:
                return await asyncio.wrap_future(waiting)
            except asyncio.CancelledError as error:
                task = asyncio.current_task()
                if self._over and task is not None and not task.cancelling():
                    raise self._is_over() from error
                raise

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """The same for code without asyncio, in other threads only."""
        if self.is_here:
            work.close()
            raise EpisodeError("a blocking call on the event loop would wait for ever; write `async def`")
        with self._sent(work) as waiting:
            try:
                return waiting.result()
            except concurrent.futures.CancelledError as error:
                raise self._is_over() from error

    @contextlib.contextmanager
    def entered_by_waiting(self, context: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """The context, entered and left there."""
        value = self.wait(context.__aenter__())
        try:
            yield value
        finally:
            if not self._over:  # Or the episode has left it.
                self.wait(_left(context))

    def heard_here(self, fn: Callable[P, None]) -> Callable[P, None]:
        """`fn` for code there to call, run on the loop that this is called on."""
        if self.is_here:
            return fn
        loop = asyncio.get_running_loop()

        def send(*args: P.args, **kwargs: P.kwargs) -> None:
            with contextlib.suppress(RuntimeError):  # That loop is closed.
                loop.call_soon_threadsafe(partial(fn, *args, **kwargs))

        return send

    def close(self) -> None:
        """Let go of all that wait in other threads."""
        self._over = True
        for waiting in tuple(self._waiting):
            waiting.cancel()

    @contextlib.contextmanager
    def _sent(self, work: Coroutine[Any, Any, T]) -> Iterator[concurrent.futures.Future[T]]:
        if self._over:
            work.close()
            raise self._is_over()
        waiting = asyncio.run_coroutine_threadsafe(work, self.loop)
        self._waiting.add(waiting)
        try:
            yield waiting
        finally:
            self._waiting.discard(waiting)

    def _is_over(self) -> EpisodeError:
        return EpisodeError(f"episode {self._episode_id} is over; it can make no more calls")


async def _left(context: AbstractAsyncContextManager[Any]) -> None:
    await context.__aexit__(None, None, None)
