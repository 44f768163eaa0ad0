"""The inside of the sandbox: confines this process, runs untrusted code in it, and reports how it ended.

Nothing here imports the rest of Etude: the process has only the standard library. The job comes first on
standard input, followed by the program's own input. Reports go to the former standard error, one JSON object
per line: first that this process is confined, then results of calls, last a failure. If the program tampers
with the reports, only its own result gets worse. Everything not listed here is refused, including system
calls that the kernel has gained since.
"""

import builtins
import ctypes
import errno
import json
import linecache
import os
import resource
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyseccomp
from landlock import Ruleset
from landlock.plumbing import FSAccess, landlock_abi_version
from pyseccomp import EQ, MASKED_EQ, Arg

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

_READ = FSAccess.READ_FILE | FSAccess.READ_DIR
_OPEN_FILES = 64
_TRUNCATING = 3
"""The first version of Landlock that can forbid truncating files."""

_ALLOWED = """
brk mmap munmap mremap mprotect madvise mincore msync mlock munlock membarrier open openat openat2 close
close_range read write readv writev pread64 pwrite64 preadv pwritev preadv2 lseek stat fstat lstat
newfstatat statx access faccessat faccessat2 readlink readlinkat getdents getdents64 statfs fstatfs getcwd
chdir fchdir fadvise64 sendfile dup dup2 dup3 pipe pipe2 poll ppoll select pselect6 epoll_create
epoll_create1 epoll_ctl epoll_wait epoll_pwait epoll_pwait2 eventfd eventfd2 futex futex_waitv
set_robust_list get_robust_list set_tid_address rseq gettid arch_prctl sched_yield sched_getaffinity
sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min getcpu rt_sigaction
rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause restart_syscall
alarm getitimer setitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times
timer_create timer_settime timer_gettime timer_getoverrun timer_delete timerfd_create timerfd_settime
timerfd_gettime getpid getppid getpgrp getpgid getsid getuid geteuid getgid getegid getgroups getresuid
getresgid getpriority getrlimit getrusage uname sysinfo getrandom exit exit_group wait4 waitid
"""

_CLONE_THREAD = 0x00010000
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_FCNTL = (*range(4), *range(5, 8), 36, 37, 38, 1030)
"""Copies of descriptors and locks. No flags of files, because a program must only add to the reports, and no
receivers of signals. The size of a pipe is no choice either, because no limit counts what it holds."""
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Whether it is a terminal, its size, unread bytes, and flags of descriptors, but not attributes of files."""
_INT = 0xFFFFFFFF
"""The bits of an argument that is an `int`."""
_UNKNOWN = -1
"""The number of a call that only other machines, or later releases of libseccomp, have."""


def confine(limits: Mapping[str, int], libraries: Sequence[str]) -> None:
    """Give up everything that the job does not allow. No files stay writable but those for its output.

    Raises OSError if the kernel does not confine programs.
    """
    os.environ.clear()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The soft limit's signal tells the reason; the hard limit ends a program that ignores it.
    _limit(resource.RLIMIT_CPU, limits["cpu_seconds"], limits["cpu_seconds"] + 1)
    _limit(resource.RLIMIT_AS, limits["memory_bytes"])
    _limit(resource.RLIMIT_FSIZE, limits["output_bytes"] + 1)
    _limit(resource.RLIMIT_NOFILE, _OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)
    if landlock_abi_version() < _TRUNCATING:
        raise OSError(errno.ENOSYS, "its Landlock is too old")
    files = Ruleset()
    for path in (*libraries, *_SYSTEM):
        _allow(files, path, _READ)
    _allow(files, os.devnull, FSAccess.READ_FILE | FSAccess.WRITE_FILE | FSAccess.TRUNCATE)
    files.apply()
    os.close(files._fd)
    # No sockets, no other processes, no signals to others, and no changed names or metadata of files.
    calls = pyseccomp.SyscallFilter(pyseccomp.ERRNO(errno.EPERM))
    for name in _ALLOWED.split():
        _permit(calls, name)
    _permit(calls, "clone", Arg(0, MASKED_EQ, _CLONE_THREAD, _CLONE_THREAD))
    # The C library tries it first, and falls back to clone if it is missing.
    _permit(calls, "clone3", action=pyseccomp.ERRNO(errno.ENOSYS))
    for name in ("kill", "tgkill"):
        _permit(calls, name, Arg(0, MASKED_EQ, _INT, os.getpid()))
    # The program may read limits, but not set new ones.
    _permit(calls, "prlimit64", Arg(2, EQ, 0))
    _permit(calls, "prctl", Arg(0, MASKED_EQ, _INT, _PR_SET_NAME))
    for name, commands in (("fcntl", _FCNTL), ("ioctl", _IOCTL)):
        for command in commands:
            _permit(calls, name, Arg(1, MASKED_EQ, _INT, command))
    calls.load()


def _limit(what: int, soft: int, hard: int | None = None) -> None:
    now = resource.getrlimit(what)[1]
    most = sys.maxsize if now == resource.RLIM_INFINITY else now
    resource.setrlimit(what, (min(soft, most), min(soft if hard is None else hard, most)))


def _allow(files: Ruleset, path: str, access: FSAccess) -> None:
    if os.path.exists(path):  # noqa: PTH110 - pathlib takes longer to import than all this
        is_folder = os.path.isdir(path)  # noqa: PTH112
        files.allow(path, rules=access if is_folder else access & FSAccess.all_file())


def _permit(calls: pyseccomp.SyscallFilter, name: str, *when: Arg, action: int = pyseccomp.ALLOW) -> None:
    number = pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name)
    if number != _UNKNOWN:
        calls.add_rule(action, number, *when)


FILE = "program.py"

_HEADER_BYTES = 12


def main() -> None:
    """Run the job from standard input, and report how it failed, if it does."""
    # Standard input is a file, which is read at once. The rest is the program's.
    job: dict[str, Any] = json.loads(os.read(0, int(os.read(0, _HEADER_BYTES))))
    descriptor = os.dup(2)
    # Bound now, so that a program that changes these modules does not change the reports by mistake.
    write, dumps = os.write, json.dumps

    def report(message: Mapping[str, Any]) -> None:
        line = dumps(message).encode() + b"\n"
        while line:
            line = line[write(descriptor, line) :]

    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        confine(job["limits"], job["libraries"])
    except OSError as error:
        report({"unconfined": str(error)})
        return
    if os.getppid() != job["parent"]:
        return  # It died before the kernel was told to end this process with it.
    report({"unconfined": None})

    def fail(error: BaseException | None) -> None:
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            report(_describe_end(error))

    # A thread that exits ends nothing else.
    threading.excepthook = lambda given: None if given.exc_type is SystemExit else fail(given.exc_value)
    try:
        _run(job, report)
    except BaseException as error:  # noqa: BLE001 - it is untrusted code
        fail(error)
    # The interpreter waits for threads, runs hooks and flushes, as it does at the end of every program.


def _run(job: Mapping[str, Any], report: Callable[[Mapping[str, Any]], None]) -> None:
    source = job["source"]
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = FILE
    sys.modules["__main__"] = module
    sys.path[:] = [path for path in sys.path if path and path not in sys.argv]
    sys.argv = [FILE]
    # `site`, which defines these, is not loaded.
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    exec(compile(source, FILE, "exec"), module.__dict__)
    if job["function"] is None:
        return
    function = _find(module, job["function"])
    for index, arguments in enumerate(job["calls"]):
        try:
            value = function(*arguments)
            try:
                report({"call": index, "value": value})
            except (TypeError, ValueError, RecursionError):
                raise TypeError(f"the value is a {type(value).__name__} that JSON cannot represent") from None
        except (MemoryError, PermissionError, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - it is untrusted code
            report({"call": index, "error": _describe(error)})


def _find(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """Return the named function, or the named method of a class Solution, as some puzzles want it."""
    holder = module if hasattr(module, name) else getattr(module, "Solution", None)
    if holder is None:
        raise NameError(f"there is no function '{name}'")
    attribute = getattr(holder() if isinstance(holder, type) else holder, name, None)
    if not callable(attribute):
        raise NameError(f"there is no function '{name}'")
    function: Callable[..., Any] = attribute
    return function


def _describe_end(error: BaseException) -> dict[str, str]:
    if isinstance(error, MemoryError):
        return {"end": "memory", "reason": "it asked for more memory than its limit"}
    if isinstance(error, SystemExit):
        return {"end": "error", "reason": f"it exited with status {error.code!r}"}
    return {"end": "refused" if isinstance(error, PermissionError) else "error", "reason": _describe(error)}


def _describe(error: BaseException) -> str:
    """Return `Type: message (line 3: the line)`, with the program's innermost line."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1:]
    what = text[0] if text else type(error).__name__
    return f"{what} (line {lines[-1].lineno}: {lines[-1].line})" if lines else what
