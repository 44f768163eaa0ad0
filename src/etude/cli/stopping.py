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
def stoppable(end: Callable[[int], None], last_words: Callable[[], str]) -> Iterator[None]:
    """Have SIGTERM and Ctrl-C call `end` with their number, in another thread, within the block.

    The process is ended if that does not, after Ctrl-C only if it is pressed again. `last_words` are written
    to standard error then. Nothing is raised in the midst of a clean-up, and after the block Ctrl-C does
    nothing if it was pressed before: the command's last words come next. Does nothing outside of the main
    thread, and where the system has no such signals.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(os, "set_blocking"):
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    interrupted = threading.Event()

    def ended(number: int) -> None:
        if number == signal.SIGINT:
            interrupted.set()
        end(number)

    before = {number: signal.signal(number, _nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    over = threading.Event()
    listener = threading.Thread(
        target=_listen, args=(reader, over, ended, last_words), name="etude-signals", daemon=True
    )
    listener.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])
        signal.signal(signal.SIGINT, signal.SIG_IGN if interrupted.is_set() else before[signal.SIGINT])
        os.close(writer)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C does nothing within the block, which is short. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _nothing(number: int, frame: FrameType | None) -> None:
    """With a handler of Python's the system does not end the process."""


def _listen(
    reader: int, over: threading.Event, end: Callable[[int], None], last_words: Callable[[], str]
) -> None:
    interrupts = 0
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while numbers := pipe.read(1):
            number = numbers[0]
            if number == signal.SIGTERM:
                end(number)
                if not over.wait(CLEAN_UP_SECONDS):
                    _exit(number, last_words)
            elif number == signal.SIGINT:
                interrupts += 1
                if interrupts == 1:
                    end(number)
                elif not over.wait(_AGAIN_SECONDS):
                    _exit(number, last_words)


def _exit(number: int, last_words: Callable[[], str]) -> None:
    """End the process as a shell says of one that the signal ended."""
    with suppress(OSError):
        os.write(2, (_SHOW_CURSOR if sys.stderr.isatty() else b"") + last_words().encode())
    _end_process(128 + number)
