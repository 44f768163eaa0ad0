"""An audit hook: Python itself refuses what the sandbox forbids.

Where the kernel enforces the same, this only makes for clearer errors. Where it does not, this is all
there is; code that is made to break out of it can.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

Check = Callable[[tuple[Any, ...]], str | None]
"""From an event's arguments to what is wrong with them."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

_PROCESSES = (
    "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.startfile", "os.system",
    "pty.spawn", "subprocess.Popen",
)  # fmt: skip
_METADATA = ("os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr", "os.chflags")
_CHANGING = ("os.mkdir", "os.remove", "os.rmdir", "os.truncate")
_CHANGING_TWO = ("os.rename", "os.link")
_LOOKING = ("os.listdir", "os.scandir")
_WAYS_OUT = ("ctypes", "_ctypes", "_posixsubprocess")


class Refused(PermissionError):
    """The program tried what the sandbox forbids."""


def install(readable: Sequence[str], writable: Sequence[str], *, alone: bool) -> None:
    """Confine this process for good. `alone` says that no kernel does what the hook cannot."""
    checks = _checks(Paths((*readable, *writable)), Paths(writable), alone)
    sockets, foreign = "it opened a socket", "it called into native code"

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        check = checks.get(event)
        problem = check(arguments) if check is not None else None
        if problem is None and event.startswith("socket."):
            problem = sockets
        if problem is None and alone and event.startswith("ctypes."):
            problem = foreign
        if problem is not None:
            raise Refused(errno.EACCES, problem)

    sys.addaudithook(hook)


class Paths:
    """Files and folders, and all that is in them."""

    def __init__(self, roots: Sequence[str]) -> None:
        self._files = {os.path.realpath(root) for root in roots}
        self._folders = tuple(root.rstrip("/") + "/" for root in self._files)

    def hold(self, path: Any) -> bool:
        """Whether a path, as functions of `os` take it, lies in them. An open file always does."""
        if isinstance(path, int):
            return True
        real = os.path.realpath(os.fsdecode("." if path is None else path))
        return real in self._files or real.startswith(self._folders)


def _checks(readable: Paths, writable: Paths, alone: bool) -> dict[str, Check]:
    def opening(arguments: tuple[Any, ...]) -> str | None:
        path, mode, flags = arguments
        writes = bool(flags & _WRITING) or (isinstance(mode, str) and bool(set(mode) & set("wax+")))
        if writes and not writable.hold(path):
            return f"it opened {path!r} for writing, outside of its folder"
        return None if readable.hold(path) else f"it opened {path!r}, outside of its folder"

    def changing(arguments: tuple[Any, ...]) -> str | None:
        return None if writable.hold(arguments[0]) else f"it changed {arguments[0]!r}, outside of its folder"

    def changing_two(arguments: tuple[Any, ...]) -> str | None:
        return changing(arguments) or changing(arguments[1:])

    def looking(arguments: tuple[Any, ...]) -> str | None:
        return None if readable.hold(arguments[0]) else f"it listed {arguments[0]!r}, outside of its folder"

    def signalling(arguments: tuple[Any, ...]) -> str | None:
        return None if arguments[0] == os.getpid() else "it sent a signal to another process"

    def importing(arguments: tuple[Any, ...]) -> str | None:
        return f"it imported {arguments[0]}" if arguments[0] in _WAYS_OUT else None

    checks: dict[str, Check] = {"open": opening, "os.kill": signalling}
    checks |= dict.fromkeys(_CHANGING, changing)
    checks |= dict.fromkeys(_CHANGING_TWO, changing_two)
    checks |= dict.fromkeys(_LOOKING, looking)
    checks |= dict.fromkeys(_PROCESSES, lambda _: "it started a process")
    checks |= dict.fromkeys(_METADATA, lambda _: "it changed who may use a file, or when it was changed")
    checks |= dict.fromkeys(("resource.setrlimit", "resource.prlimit"), lambda _: "it changed its limits")
    checks["os.symlink"] = lambda _: "it made a symbolic link"
    checks["os.killpg"] = lambda _: "it sent a signal to other processes"
    if alone:
        checks["import"] = importing
        checks["gc.get_objects"] = lambda _: "it looked for objects that it was not given"
    return checks
