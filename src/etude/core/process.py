"""The settings of a process of Etude's: garbage collection, waiting threads, open files, masked outputs."""

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from etude.core.secrets import masked

_NEW_OBJECTS = 20_000
"""Containers made and not freed until the young ones are looked through; Python's own figure is 700."""
_TURNS = "10000"
_NAMES = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Have cyclic garbage collected more rarely for as long as the block goes on.

    A GRPO step of 128 short episodes spent 28 % of its CPU time on it. Where a program has set a higher
    threshold, or none, that stays.
    """
    before = gc.get_threshold()
    if 0 < before[0] < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def set_up_process() -> None:
    """Set all of it for this process; a program calls it before it loads torch.

    Secrets are masked in what this process writes to standard output and error; programs that it starts write
    there by themselves.

    Loading torch and transformers takes 2.6 s of CPU time in place of 3.0 where garbage is collected rarely.

    OpenMP's threads that wait for one another turn some 300,000 times before they sleep, and take the core
    on which another program would be working. Beside others (load 8, two cores, SmolLM2-135M's shape, two
    threads) loading and sampling 16 x 8 tokens three times took 18 and 19 s of CPU time with fewer turns, and
    49 s by default. Where the environment says how to wait, it is as it says.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    if not any(name in os.environ for name in _NAMES):
        os.environ[_NAMES[0]] = _TURNS
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, MaskedStream):
            setattr(sys, name, MaskedStream(stream))


class MaskedStream:
    """A text stream in which secrets are masked; everything else is as in the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, its secrets masked."""
        self._stream.write(masked(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the texts one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def allow_open_files() -> None:
    """Let this process have as many files and connections open as the system allows; many say 1,024 first."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
