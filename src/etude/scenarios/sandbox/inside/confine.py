"""Confining this process, before any untrusted code runs."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etude.scenarios.sandbox.inside import audit

_SYSTEM = (
    "/usr/lib",
    "/usr/lib64",
    "/lib",
    "/lib64",
    "/etc/ld.so.cache",
    "/usr/share/zoneinfo",
    "/dev/urandom",
)
"""Paths that the standard library may need to read later: shared libraries and time zones."""


def confine(job: Mapping[str, Any]) -> dict[str, str]:
    """Give up everything the job does not allow; what enforces it, by `network`, `files`, `processes`.

    The current folder is the one that may be written to.
    """
    os.environ.clear()
    readable = [path for path in (*job["libraries"], *_SYSTEM) if os.path.exists(path)]  # noqa: PTH110
    writable = [os.getcwd(), os.devnull]  # noqa: PTH109 - pathlib takes longer to import than all this
    _set_limits(job["limits"])
    guards = _by_kernel(job["mechanisms"], readable, writable) if sys.platform == "linux" else {}
    if "processes" not in guards:
        _limit(resource.RLIMIT_NPROC, 0)
    audit.install(readable, writable, alone=len(guards) < 3)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[name]
    return {what: guards.get(what, "audit hook") for what in ("network", "files", "processes")}


def _by_kernel(mechanisms: Sequence[str], readable: list[str], writable: list[str]) -> dict[str, str]:
    """Use the mechanisms that this kernel has and permits, each for itself."""
    from etude.scenarios.sandbox.inside import landlock, linux, seccomp

    guards: dict[str, str] = {}
    linux.die_with_parent()
    linux.forbid_new_privileges()
    if "landlock" in mechanisms and _done(lambda: landlock.install(readable, writable)):
        guards["files"] = "landlock"
    if "seccomp" in mechanisms and _done(seccomp.install):
        guards |= {"network": "seccomp", "processes": "seccomp"}
    elif "namespace" in mechanisms and _done(linux.leave_network):
        guards["network"] = "namespace"
    _done(linux.drop_capabilities)
    return guards


def _done(step: Callable[[], None]) -> bool:
    try:
        step()
    except OSError:
        return False
    return True


def _set_limits(limits: Mapping[str, int]) -> None:
    seconds = limits["cpu_seconds"]
    # The soft limit's signal says what happened; the hard one ends a program that ignores it.
    _limit(resource.RLIMIT_CPU, seconds, seconds + 1)
    _limit(resource.RLIMIT_AS, limits["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, limits["file_bytes"])
    _limit(resource.RLIMIT_NOFILE, limits["open_files"])
    _limit(resource.RLIMIT_CORE, 0)


def _limit(what: int, soft: int, hard: int | None = None) -> None:
    hard = soft if hard is None else hard
    now = resource.getrlimit(what)[1]
    if now != resource.RLIM_INFINITY:
        soft, hard = min(soft, now), min(hard, now)
    # macOS knows limits that it does not let anyone set.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(what, (soft, hard))
