"""A seccomp filter: which system calls a confined program gets an error from.

No sockets, no other processes, no signals to others, no changed metadata of files, and none of the
calls that would undo this. What the kernel has learnt since is refused too.
"""

from __future__ import annotations

import errno
import os
import struct

from etude.scenarios.sandbox.inside import linux

_ALLOW = 0x7FFF0000
_ERROR = 0x00050000
_LOAD = 0x20
_EQUAL = 0x15
_GREATER = 0x25
_ANY_OF = 0x45
_RETURN = 0x06

_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in `struct seccomp_data`."""

_CLONE_THREAD = 0x00010000
_NEWEST = 450
"""The last system call that was looked at."""

# What only one of the architectures has, or numbers otherwise. From 424 on all number alike.
_X86_64: dict[str, int] = {
    "fcntl": 72, "prctl": 157, "kill": 62, "tgkill": 234, "prlimit64": 302, "clone": 56,
    "fallocate": 285,
    "shmget": 29, "shmat": 30, "socket": 41, "connect": 42, "accept": 43, "bind": 49, "listen": 50,
    "socketpair": 53, "fork": 57, "vfork": 58, "execve": 59, "semget": 64, "msgget": 68, "chmod": 90,
    "fchmod": 91, "chown": 92, "fchown": 93, "lchown": 94, "ptrace": 101, "setpgid": 109, "setsid": 112,
    "rt_sigqueueinfo": 129, "utime": 132, "setpriority": 141, "sched_setparam": 142,
    "sched_setscheduler": 144, "pivot_root": 155, "setrlimit": 160, "chroot": 161, "mount": 165,
    "umount2": 166, "setxattr": 188, "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197,
    "lremovexattr": 198, "fremovexattr": 199, "tkill": 200, "sched_setaffinity": 203, "utimes": 235,
    "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
    "migrate_pages": 256, "fchownat": 260, "futimesat": 261, "fchmodat": 268, "unshare": 272,
    "move_pages": 279, "utimensat": 280, "accept4": 288, "rt_tgsigqueueinfo": 297, "perf_event_open": 298,
    "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "sched_setattr": 314, "memfd_create": 319, "bpf": 321, "execveat": 322,
    "userfaultfd": 323,
}  # fmt: skip
_AARCH64: dict[str, int] = {
    "fcntl": 25, "prctl": 167, "kill": 129, "tgkill": 131, "prlimit64": 261, "clone": 220,
    "fallocate": 47,
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
    "fremovexattr": 16, "ioprio_set": 30, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51,
    "fchmod": 52, "fchmodat": 53, "fchownat": 54, "fchown": 55, "utimensat": 88, "unshare": 97,
    "ptrace": 117, "sched_setparam": 118, "sched_setscheduler": 119, "sched_setaffinity": 122,
    "tkill": 130, "rt_sigqueueinfo": 138, "setpriority": 140, "setpgid": 154, "setsid": 157,
    "setrlimit": 164, "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmat": 196,
    "socket": 198, "socketpair": 199, "bind": 200, "listen": 201, "accept": 202, "connect": 203,
    "add_key": 217, "request_key": 218, "keyctl": 219, "execve": 221, "migrate_pages": 238,
    "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241, "accept4": 242,
    "open_by_handle_at": 265, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271,
    "kcmp": 272, "sched_setattr": 274, "memfd_create": 279, "bpf": 280, "execveat": 281,
    "userfaultfd": 282,
}  # fmt: skip
_COMMON: dict[str, int] = {
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433,
    "pidfd_open": 434, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442,
    "memfd_secret": 447, "process_mrelease": 448,
}  # fmt: skip
_CLONE3 = 435
_LOOKED_AT = ("fcntl", "prctl", "kill", "tgkill", "prlimit64", "clone", "fallocate")
"""Refused or not by their arguments."""

_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}


def install() -> None:
    """Confine this process for good. Raises OSError where the kernel has no seccomp."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, f"no filter is written for {machine}")
    linux.install_filter(b"".join(_filter(*_MACHINES[machine], os.getpid())))


def _filter(architecture: int, numbers: dict[str, int], own_pid: int) -> list[bytes]:
    refuse = _op(_RETURN, _ERROR | errno.EPERM)
    unknown = _op(_RETURN, _ERROR | errno.ENOSYS)
    allow = _op(_RETURN, _ALLOW)
    program = [
        _op(_LOAD, _ARCHITECTURE),
        *(_op(_EQUAL, architecture, 1, 0), refuse),
        _op(_LOAD, _NUMBER),
        # The C library tries clone3 first, and takes clone where there is none.
        *(_op(_EQUAL, _CLONE3, 0, 1), unknown),
        *(_op(_GREATER, _NEWEST, 0, 1), unknown),
    ]
    for name, number in (numbers | _COMMON).items():
        if name not in _LOOKED_AT:
            program += [_op(_EQUAL, number, 0, 1), refuse]
    null = (_op(_EQUAL, 0, 1, 0), refuse)
    for name, rule in (
        ("clone", [_argument(0), _op(_ANY_OF, _CLONE_THREAD, 1, 0), refuse]),
        ("kill", [_argument(0), _op(_EQUAL, own_pid, 1, 0), refuse]),
        ("tgkill", [_argument(0), _op(_EQUAL, own_pid, 1, 0), refuse]),
        # Reading limits is fine, setting them is not: the pointer to new ones must be null, both halves.
        ("prlimit64", [_argument(2), *null, _argument(2, 4), *null]),
        # Only what shows in a file's size: the limits are about that.
        ("fallocate", [_argument(1), _op(_EQUAL, 0, 1, 0), refuse]),
        # PR_SET_PDEATHSIG
        ("prctl", [_argument(0), _op(_EQUAL, 1, 0, 1), refuse]),
        # Another way to send signals: F_SETOWN, F_SETSIG, F_SETOWN_EX.
        ("fcntl", [_argument(1), *(op for cmd in (8, 10, 15) for op in (_op(_EQUAL, cmd, 0, 1), refuse))]),
    ):
        program += [_op(_EQUAL, numbers[name], 0, len(rule) + 1), *rule, allow]
    return [*program, allow]


def _argument(index: int, half: int = 0) -> bytes:
    """Load the low half of an argument, or with 4 the high one."""
    return _op(_LOAD, _ARGUMENTS + 8 * index + half)


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
