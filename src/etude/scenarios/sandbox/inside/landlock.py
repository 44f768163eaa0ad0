"""Landlock: the kernel lets a confined program see and change only these folders.

See https://docs.kernel.org/userspace-api/landlock.html.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable

from etude.scenarios.sandbox.inside import linux

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_ONLY = 1
_PATH_BENEATH = 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_DIR, _MAKE_REG = 1 << 7, 1 << 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_FIRST_VERSION = (1 << 13) - 1

_READ = _READ_FILE | _READ_DIR
_CHANGE = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _TRUNCATE
_ON_FILES = _WRITE_FILE | _READ_FILE | _TRUNCATE


def install(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Confine this process for good. Paths that do not exist are left out.

    Raises OSError where the kernel has no Landlock, or one that cannot forbid truncating files.
    """
    version = linux.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(_VERSION_ONLY))
    if version < 3:
        raise OSError(f"Landlock {version} is too old")
    files = _FIRST_VERSION | _REFER | _TRUNCATE | (_IOCTL_DEV if version >= 5 else 0)
    network = 3 if version >= 4 else 0  # TCP: bind and connect.
    scoped = 3 if version >= 6 else 0  # Abstract sockets, and signals.
    ruleset = (ctypes.c_uint64 * 3)(files, network, scoped)
    size = 8 if version < 4 else 16 if version < 6 else 24
    descriptor = linux.syscall(
        _CREATE_RULESET, ctypes.byref(ruleset), ctypes.c_size_t(size), ctypes.c_uint(0)
    )
    try:
        for path in readable:
            _allow(descriptor, path, _READ)
        for path in writable:
            _allow(descriptor, path, _READ | _CHANGE)
        linux.syscall(_RESTRICT_SELF, ctypes.c_int(descriptor), ctypes.c_uint(0))
    finally:
        os.close(descriptor)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def _allow(ruleset: int, path: str, access: int) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not os.path.isdir(path):  # noqa: PTH112 - pathlib takes longer to import than all this
                access &= _ON_FILES
            rule = _Beneath(access, parent)
            linux.syscall(
                _ADD_RULE,
                ctypes.c_int(ruleset),
                ctypes.c_int(_PATH_BENEATH),
                ctypes.byref(rule),
                ctypes.c_uint(0),
            )
        finally:
            os.close(parent)
