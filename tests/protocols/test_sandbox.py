"""Untrusted code in the sandbox: how far it gets, and how it ends when it tries more."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from etude.protocols.sandbox import Limits, Returned, SandboxResult, call_function, run_program
from tests.forked import Forked
from tests.support import is_alive, until, wait_until

LIMITS = Limits(wall_seconds=60.0)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel confines programs on Linux only")


def slow(*values: str) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


async def run(source: str, *, limits: Limits = LIMITS) -> SandboxResult:
    return await run_program(source, limits=limits)


async def run_attempts(attempts: Sequence[str]) -> list[str]:
    """Run attempts in one program: `done` for each, or the error by which it was refused."""
    each = "try:\n exec(attempt)\n print('done')\nexcept BaseException as error:\n print(repr(error)[:200])"
    result = await run(f"for attempt in {list(attempts)!r}:\n " + each.replace("\n", "\n "))
    assert result.status == "ok", result
    lines = result.output.splitlines()
    assert len(lines) == len(attempts), lines
    return lines


# What programs may do.


async def test_a_program_reads_its_input_and_its_output_is_kept():
    result = await run_program("print(int(input()) * 2)\nprint('é')", stdin="21\n")
    assert (result.status, result.reason, result.output) == ("ok", "", "42\né\n")


async def test_a_program_has_only_the_standard_library():
    source = "import sys\nprint({name.partition('.')[0] for name in sys.modules} & {'etude', 'pydantic'})"
    assert (await run(source)).output == "set()\n"


async def test_what_ordinary_programs_do_works():
    source = """
import atexit, heapq, collections, math, os, re, sys, threading as t, time, zoneinfo
atexit.register(print, 'late')
t.Thread(target=lambda: (time.sleep(0.1), print('x'))).start()
if __name__ == '__main__': print('main', math.gcd(4, 6))
print(os.getcwd(), open(os.devnull, 'w').write('x'), len(os.urandom(3)))
print(list({'a', 'b', 'c', 'd'})[0] == list({'d', 'c', 'b', 'a'})[0])
sys.stdout.write('no newline\\n')
sys.exit(0)
"""
    result = await run(source)
    said = "main 2\n/ 1 3\nTrue\nno newline\nx\nlate\n"
    assert (result.status, result.reason, result.output) == ("ok", "", said)
    assert (await run("print('a', end=''); exit()")).output == "a"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1\nprint(1 / 0)", "ZeroDivisionError: division by zero (line 2: print(1 / 0))"),
        ("import sys; sys.exit(3)", "status 3"),
        ("import os; os.abort()", "signal 6"),
        ("import threading as t\ndef f(): raise ValueError('in a thread')\nt.Thread(target=f).start()",
         "ValueError: in a thread"),
        slow("def f(:", "SyntaxError: invalid syntax"),
        slow("raise SystemExit('no')", "status 'no'"),
        slow("raise KeyboardInterrupt", "KeyboardInterrupt (line 1: raise KeyboardInterrupt)"),
        slow("def f(): f()\nf()", "recursion depth exceeded (line 1: def f(): f())"),
        slow("print('\\ud800')", "UnicodeEncodeError"),
        slow("null\0byte", "null bytes"),
    ],
)  # fmt: skip
async def test_a_program_that_fails_is_an_error_with_its_reason(source: str, reason: str):
    result = await run(source)
    assert result.status == "error"
    assert reason in result.reason


# What they may not: with the kernel's help, and with Python's own.


STARTING = [
    "import subprocess; subprocess.run(['true'])",
    "import os, sys; sys.exit(os.system('true'))",
    "import os; os.execv('/bin/true', ['true'])",
    "import os; os.posix_spawn('/bin/true', ['true'], {})",
    "import multiprocessing as m; m.get_context('fork').Process(target=print).start()",
    "import pty; pty.spawn('/bin/true')",
]


async def test_no_process_is_started():
    for attempt, error in zip(STARTING, await run_attempts(STARTING), strict=True):
        assert error not in ("done", "SystemExit(0)"), attempt


@pytest.mark.parametrize(
    "failing", ["1 / 0", "raise SystemExit(3)", "open('/etc/passwd')", "bytearray(10**12)"]
)
async def test_what_a_program_has_printed_before_it_fails_is_kept(failing: str):
    result = await run(f"print('so far')\n{failing}")
    assert (result.status == "ok", result.output) == (False, "so far\n")


@pytest.mark.parametrize("source", ["x = []\nwhile 1: x.append('x' * 10**7)", slow("x = bytearray(10**12)")])
async def test_a_memory_hog_is_stopped(source: str):
    assert (await run(source)).status == "memory"


ENDLESS = [
    "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "import os, time\nos.closerange(0, 64)\ntime.sleep(1000)",
    "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
    "(" * 80 + "10**10**10" + ")" * 80,
    slow("import atexit, time; atexit.register(time.sleep, 1000)"),
    slow("try:\n    while True: pass\nfinally:\n    while True: pass"),
    slow("import re; re.match('(a+)+b', 'a' * 100)"),
    slow("class E:\n    def __del__(self):\n        while True: pass\nE()"),
]


@pytest.mark.parametrize("source", ENDLESS)
async def test_what_does_not_end_is_ended(source: str):
    result = await run(source, limits=Limits(wall_seconds=0.5))
    assert result.status == "timeout" and " 0.5 s" in result.reason
    assert result.seconds < 60


@pytest.mark.slow
async def test_cpu_time_is_bounded_for_those_who_ignore_the_signal():
    ignoring = "import signal; signal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert (await run(ignoring, limits=Limits(wall_seconds=300, cpu_seconds=1))).status == "timeout"


async def test_output_is_bounded():
    result = await run("while True: print('x' * 1000)", limits=replace(LIMITS, output_bytes=10_000))
    assert (result.status, len(result.output)) == ("error", 10_000)
    assert " 10000 bytes" in result.reason


async def test_no_file_is_written(tmp_path: Path):
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    other = str(tmp_path / "other.txt")
    attempts = [
        "open('x', 'w')",
        f"open({other!r}, 'w')",
        f"open({str(mine)!r}, 'a')",
        f"import os; os.open({other!r}, os.O_CREAT | os.O_WRONLY)",
        f"import os; os.open({str(mine)!r}, os.O_RDONLY | os.O_TRUNC)",
        f"import os; os.remove({str(mine)!r})",
        f"import os; os.truncate({str(mine)!r}, 0)",
        f"import os; os.chmod({str(mine)!r}, 0)",
        f"import os; os.utime({str(mine)!r})",
        f"import os; os.rename({str(mine)!r}, {other!r})",
        f"import os; os.link({str(mine)!r}, {other!r})",
        f"import os; os.symlink({str(mine)!r}, {other!r})",
        f"import os; os.mkdir({other!r})",
        f"import pathlib; pathlib.Path({other!r}).touch()",
    ]
    for attempt, error in zip(attempts, await run_attempts(attempts), strict=True):
        assert error.startswith("PermissionError"), (attempt, error)
    through = ["import os; os.write(0, b'x')", "import tempfile; tempfile.TemporaryFile()"]
    through.append(f"import sqlite3; sqlite3.connect({other!r}).execute('create table t (x)')")
    assert "done" not in await run_attempts(through)
    assert mine.read_text() == "mine"
    assert names_in(tmp_path) == ["mine.txt"]


async def test_no_file_is_read(tmp_path: Path):
    secret = tmp_path / "secret.txt"
    secret.write_text("secret")
    paths = (secret, Path("/etc/passwd"), Path(f"/proc/{os.getpid()}/environ"))
    attempts = [f"open({str(path)!r}).read()" for path in paths]
    for error in await run_attempts([*attempts, f"import os; os.listdir({str(tmp_path)!r})"]):
        assert error.startswith("PermissionError")
    assert (await run(f"print(open({str(secret)!r}).read())")).status == "refused"


async def test_no_socket_is_opened():
    attempts = (
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 80))",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import socket; socket.socketpair()",
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
    )
    for error in await run_attempts(attempts):
        assert any(word in error for word in ("socket", "not permitted", "imported", "resolution")), error


async def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert (await run("import os; print(dict(os.environ), os.getenv('HOME'))")).output == "{} None\n"


async def test_nobody_else_is_killed():
    kills = ("os.kill(os.getppid(), 9)", "os.kill(-1, 9)", "os.killpg(os.getpgid(os.getppid()), 15)")
    for error in await run_attempts([f"import os; {kill}" for kill in kills]):
        assert error.startswith("PermissionError")
    suicide = await run("import os; os.kill(os.getpid(), 15)")
    assert suicide.status == "error" and "signal 15" in suicide.reason


async def test_the_kernel_holds_what_python_does_not_see(tmp_path: Path):
    native = f"""
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
attempts = {{
    "fork": lambda: libc.fork(),
    "execve": lambda: libc.execve(b"/bin/true", None, None),
    "socket": lambda: libc.socket(2, 1, 0),
    "kill": lambda: libc.kill(os.getppid(), 0),
    "tgkill": lambda: libc.tgkill(os.getppid(), os.getppid(), 0),
    "open": lambda: libc.open({str(tmp_path / "x").encode()!r}, os.O_CREAT | os.O_WRONLY, 0o600),
    "environ": lambda: libc.open(b"/proc/%d/environ" % os.getppid(), os.O_RDONLY),
    "chmod": lambda: libc.chmod({str(tmp_path).encode()!r}, 0),
    "unlink": lambda: libc.unlink({str(tmp_path / "mine").encode()!r}),
    "ptrace": lambda: libc.ptrace(16, os.getppid(), 0, 0),
    "unshare": lambda: libc.unshare(0x10000000),
    "flags of a file": lambda: libc.ioctl(os.open(os.__file__, 0), 0x80086601, ctypes.byref(ctypes.c_long())),
    "prlimit": lambda: libc.prlimit(os.getppid(), 0, (ctypes.c_ulong * 2)(1, 1), None),
    "setsid": lambda: libc.setsid(),
    "memfd_create": lambda: libc.memfd_create(b"x", 0),
    "fcntl": lambda: libc.fcntl(0, 8, os.getppid()),
    "larger pipe": lambda: libc.fcntl(os.pipe()[1], 1031, 2**20),
    "clone3": lambda: libc.syscall(435, (ctypes.c_uint64 * 11)(), 88),
    "io_uring": lambda: libc.syscall(425, 1, (ctypes.c_uint8 * 120)()),
}}
print([name for name, attempt in attempts.items() if attempt() != -1])
"""
    (tmp_path / "mine").touch()
    result = await run(native)
    assert (result.status, result.output) == ("ok", "[]\n")
    assert names_in(tmp_path) == ["mine"]


async def test_what_a_program_reports_of_itself_is_only_its_own_affair():
    forged = """
import fcntl, mmap, os
for fd in range(3, 64):
    try:
        os.write(fd, b'not json\\n[1]\\n' + b'[' * 5000 + b'\\n' + b'{"call": "x"}\\n{"call": 10**9}\\n')
        os.write(fd, b'{"unconfined": "no"}\\n{"call": 7, "value": 1}\\n')
        os.write(fd, b'{"end": "error", "reason": "a"}\\n')
    except OSError:
        pass
    for attempt in (
        lambda: fcntl.fcntl(fd, fcntl.F_SETFL, 0),
        lambda: os.pwrite(fd, b'{"unconfined": "no"}\\n', 0),
        lambda: os.pwritev(fd, [b'{"unconfined": "no"}\\n'], 0, 0x20),
        lambda: mmap.mmap(fd, 10).write(b'{"unconfined": "no"}\\n'),
    ):
        try:
            attempt()
        except (OSError, ValueError):
            pass
def f(): return 1
"""
    result = await call_function(forged, "f", [()], limits=LIMITS)
    assert (result.status, result.reason, result.returned) == ("error", "a", (Returned(1),))


async def test_a_cancelled_run_leaves_no_process():
    others = children()
    task = asyncio.ensure_future(run("import time; time.sleep(1000)", limits=Limits(wall_seconds=60)))
    await until(lambda: children() != others)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() == others


def test_a_program_dies_with_its_parent():
    script = (
        "import asyncio\nfrom etude.protocols.sandbox import run_program\n"
        "asyncio.run(run_program('import time; time.sleep(1000)'))"
    )
    parent = Forked(["-c", script], Path.cwd(), dict(os.environ), program="python")
    try:
        found = wait_until(lambda: children(parent.pid))
    finally:
        parent.kill()
        parent.communicate()
    wait_until(lambda: not any(is_alive(child) for child in found))


def test_whatever_is_stopped_while_it_starts_ends():
    async def start_and_fail(after: float) -> None:
        sleeping = [asyncio.ensure_future(run("import time; time.sleep(1000)")) for _ in range(3)]
        await asyncio.wait(sleeping, timeout=after)
        raise LookupError

    others = children()
    for after in (0.0, 0.002, 0.004, 0.008, 0.02):
        with pytest.raises(LookupError):
            asyncio.run(start_and_fail(after))
        assert children() == others


async def test_many_run_at_once_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    results = await asyncio.gather(*(run("print(1)") for _ in range(2)))
    assert [result.status for result in results] == ["ok"] * 2
    assert not names_in(tmp_path)


# Calls of a function.


async def test_each_call_gives_a_value_or_an_error_of_its_own():
    source = "def f(a, b):\n    return a // b, [a]"
    result = await call_function(source, "f", [(4, 2), (1, 0), ("x", 1), (9, 3)])
    assert result.status == "ok"
    good, by_zero, of_text, also_good = result.returned
    assert (good, also_good) == (Returned([2, [4]]), Returned([3, [9]]))
    where = "(line 2: return a // b, [a])"
    assert str(by_zero.error).startswith("ZeroDivisionError: ") and str(by_zero.error).endswith(where)
    assert of_text.error is not None and of_text.error.startswith("TypeError: unsupported operand")


async def test_calls_before_the_one_that_does_not_end_are_kept():
    source = "def f(a):\n    while a: pass\n    return a"
    result = await call_function(
        source, "f", [(0,), (1,), (0,)], limits=Limits(wall_seconds=60, cpu_seconds=1)
    )
    assert (result.status, result.returned) == ("timeout", (Returned(0),))
    assert "1 s of CPU time" in result.reason


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def children(parent: int | None = None) -> set[int]:
    """The processes that one has started, this one by default."""
    return {child.pid for child in psutil.Process(parent).children() if is_alive(child.pid)}
