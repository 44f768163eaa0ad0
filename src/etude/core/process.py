"""The settings of an Etude process: garbage collection, waiting threads, open files, masked outputs."""

import gc
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from etude.core.secrets import mask_secrets

_NEW_OBJECTS = 100_000
"""New container objects that trigger a collection of the youngest generation; Python's default is 700."""
_TURNS = "10000"
_NAMES = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"


_blocks: list[tuple[int, int, int]] = []
"""For each block of `rare_garbage_collection` that is open, the thresholds from before the first."""


@contextmanager
def rare_garbage_collection() -> Iterator[None]:
    """Run cyclic garbage collection more rarely inside the block, and inside others that overlap it.

    A GRPO step of 128 short episodes spent 28 % of its CPU time on it. A higher threshold that the program
    has set, or disabled collection, is left unchanged.
    """
    before = _blocks[0] if _blocks else gc.get_threshold()
    _blocks.append(before)
    if 0 < before[0] < _NEW_OBJECTS:
        gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        _blocks.pop()
        if not _blocks:
            gc.set_threshold(*before)


def set_up_process() -> None:
    """Apply the settings to this process, before torch is loaded. Its outputs are masked from then on.

    With rarer garbage collection, loading torch and transformers takes 3.0 s of CPU time instead of 3.4 s.
    OpenMP threads that wait spin some 300,000 times before they sleep, and keep a core from other programs.
    With fewer spins, sampling with SmolLM2-135M's shape on two busy cores took 18 s of CPU time instead of
    49. A setting in the environment is left unchanged.
    """
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])
    if not any(name in os.environ for name in _NAMES):
        os.environ[_NAMES[0]] = _TURNS
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
        if not isinstance(stream, MaskedStream):
            if isinstance(stream, TextIOWrapper):  # A letter that a terminal lacks must not end a run.
                stream.reconfigure(errors="backslashreplace")
            setattr(sys, name, MaskedStream(stream))


class MaskedStream:
    """A text stream that masks secrets. Everything else is passed to the stream behind it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text with its secrets masked."""
        self._stream.write(mask_secrets(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the texts one after the other."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def allow_open_files() -> None:
    """Raise this process's limit of open files and connections to the maximum; the default is often 1,024."""
    if sys.platform != "win32":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
