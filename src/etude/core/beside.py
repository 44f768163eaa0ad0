"""Work that would keep an event loop from turning, done beside it."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

LARGE = 32 * 1024
"""Bytes or characters: work on so many takes a millisecond or more."""

_THREADS = 4
"""Few: each takes turns with the event loop at the interpreter's lock."""


async def beside_loop(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of `work`, which is done in a thread where `size`, that of what it works on, is large.

    Raises what it raises. When the caller is cancelled, the work goes on, and its result is dropped.
    """
    if size < LARGE:
        return work(*args, **kwargs)
    context = contextvars.copy_context()
    call = partial(context.run, work, *args, **kwargs)
    return await asyncio.get_running_loop().run_in_executor(_threads(), call)


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="etude-beside")
