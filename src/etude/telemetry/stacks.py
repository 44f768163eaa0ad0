"""The stacks of all threads and tasks of this process, as text: where each of them is, and no values."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterable
from types import AsyncGeneratorType, FrameType
from typing import Any

_GOING_ON = "async_generator_asend", "async_generator_athrow"
"""Awaitables of an async generator, which they do not name but to the garbage collector."""


def all_stacks(tasks: Iterable[asyncio.Task[Any]]) -> str:
    """Those of the tasks, the same ones counted, and of every thread."""
    counted = Counter(_stack(task) for task in tasks)
    parts = [f"{count} of these tasks:\n{stack}" for stack, count in counted.most_common()]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts += [
        f"thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    return "\n".join(parts)


def _stack(task: asyncio.Task[Any]) -> str:
    """Where the task is, through all that it awaits; without its name, for thousands may be at one place."""
    frames: list[tuple[FrameType, int]] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = _attribute(awaited, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            frames.append((frame, frame.f_lineno))
        awaited = _attribute(awaited, "cr_await", "gi_yieldfrom", "ag_await")
        if type(awaited).__name__ in _GOING_ON:
            held = gc.get_referents(awaited)
            awaited = next((each for each in held if isinstance(each, AsyncGeneratorType)), None)
    return "".join(traceback.StackSummary.extract(iter(frames)).format()) or f"  {task.get_coro()!r}\n"


def _attribute(awaited: object, *names: str) -> Any:
    """The first of these that is there: every kind of awaitable has names of its own."""
    return next((getattr(awaited, name) for name in names if hasattr(awaited, name)), None)
