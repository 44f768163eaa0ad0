"""SIGTERM and Ctrl-C, whatever the process does: its work is cancelled, or ended if that takes too long.

Python runs handlers between two instructions of the main thread, which may be in an endless loop of an
agent's, or in a library's call that takes a minute. So a thread listens too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

CLEAN_UP_SECONDS = 4.0
"""For the work to clean up after SIGTERM; what is journalled is safe in any case."""
_AGAIN_SECONDS = 1.0
"""For the process to end after a second Ctrl-C."""

_end_process = os._exit
"""As it is before any agent's code runs, for which it is another one."""

_SHOW_CURSOR = b"\x1b[?25h"


@contextmanager
def stoppable(end: Callable[[], None], last_words: Callable[[], str]) -> Iterator[None]:
    """Have SIGTERM call `end`, in another thread, within the block, and end the process if that does not.

    A second Ctrl-C ends it too. `last_words` are written to standard error then. Does nothing outside of the
    main thread, and where the system has no such signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(os, "set_blocking"):
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGTERM, _nothing)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    over = threading.Event()
    listener = threading.Thread(
        target=_listen, args=(reader, over, end, last_words), name="etude-signals", daemon=True
    )
    listener.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        os.close(writer)


def _nothing(number: int, frame: FrameType | None) -> None:
    """With a handler of Python's the system does not end the process."""


def _listen(
    reader: int, over: threading.Event, end: Callable[[], None], last_words: Callable[[], str]
) -> None:
    interrupts = 0
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while numbers := pipe.read(1):
            if numbers[0] == signal.SIGTERM:
                end()
                if not over.wait(CLEAN_UP_SECONDS):
                    _exit(signal.SIGTERM, last_words)
            elif numbers[0] == signal.SIGINT:
                interrupts += 1
                if interrupts > 1 and not over.wait(_AGAIN_SECONDS):
                    _exit(signal.SIGINT, last_words)


def _exit(number: int, last_words: Callable[[], str]) -> None:
    """End the process as a shell says of one that the signal ended."""
    with suppress(OSError):
        os.write(2, (_SHOW_CURSOR if sys.stderr.isatty() else b"") + last_words().encode())
    _end_process(128 + number)
