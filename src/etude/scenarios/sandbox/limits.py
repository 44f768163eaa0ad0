"""The limits of untrusted code, and the mechanisms of the kernel that confine it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from etude.core.errors import RequestError

Mechanism: TypeAlias = Literal["seccomp", "namespace", "landlock"]
"""A mechanism of the kernel that confines a program, beside the audit hook and the resource limits."""

EVERY_MECHANISM: tuple[Mechanism, ...] = ("seccomp", "namespace", "landlock")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on one run of a program. Raises RequestError for a bound that allows nothing.

    Other processes, sockets, and files outside of the run's own folder are out of bounds always.
    """

    wall_seconds: float = 10.0
    """From start to end, the interpreter's own start included."""
    cpu_seconds: int = 8
    memory_bytes: int = 512 * 1024**2
    """Address space."""
    output_bytes: int = 1024**2
    """Of standard output, and as much again of values returned."""
    file_bytes: int = 1024**2
    """Of one file in the run's own folder."""
    folder_bytes: int = 16 * 1024**2
    """Of all files together; looked at often enough, not at every write, and at the end."""
    folder_entries: int = 256
    """Files and folders together."""
    open_files: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise RequestError(f"{name} must be more than 0, found {getattr(self, name)}")
