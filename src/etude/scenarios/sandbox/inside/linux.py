"""Calls to the Linux kernel that Python has no functions for."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_CAPABILITY_VERSION_3 = 0x20080522


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


_libc = ctypes.CDLL(None, use_errno=True)


def syscall(number: int, *arguments: object) -> int:
    """Raises OSError when the kernel says no."""
    return _checked(_libc.syscall(ctypes.c_long(number), *arguments))


def die_with_parent() -> None:
    """Have this process killed when the one that started it ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def forbid_new_privileges() -> None:
    """Needed for all that follows, when one is not root."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Make root an ordinary user."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()))


def leave_network() -> None:
    """Into a network of one's own, that leads nowhere. Raises OSError where that is not permitted."""
    _checked(_libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET))


def install_filter(instructions: bytes) -> None:
    """Have all further system calls pass through a BPF program."""
    program = _Program(len(instructions) // 8, instructions)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program))


def _prctl(option: int, value: int, pointer: object = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), pointer, 0, 0))


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
