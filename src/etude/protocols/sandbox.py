"""Running untrusted Python in a process of its own: a whole program, or calls of one of its functions."""

import asyncio
import contextlib
import functools
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from etude.core.errors import EtudeError, MissingExtraError, RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits for one run of a program."""

    wall_seconds: float = 10.0
    """From start to end, including the interpreter's start."""
    cpu_seconds: int = 8
    memory_bytes: int = 512 * 1024**2
    """Address space."""
    output_bytes: int = 1024**2
    """Standard output, and as much again for returned values."""


Status: TypeAlias = Literal["ok", "error", "timeout", "memory", "refused"]
"""`ok`: ran to its end; `error`: raised, crashed, exited with a status or wrote too much; `timeout`: took too
long; `memory`: asked for more memory than allowed; `refused`: tried something that the sandbox forbids."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The result of one function call: a value, or an error."""

    value: Any = None
    """The value as JSON keeps it: a tuple becomes a list."""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """One run of a program."""

    status: Status
    reason: str = ""
    """One sentence for people; empty if the status is `ok`."""
    output: str = ""
    """Standard output, up to the limit."""
    returned: tuple[Returned, ...] = ()
    """For `call_function`: the finished calls, in order."""
    seconds: float = 0.0
    """Wall time."""


async def run_program(source: str, *, stdin: str = "", limits: Limits | None = None) -> SandboxResult:
    """Run a Python program in a separate process, with `stdin` as its standard input.

    The program has only the standard library: no network, no environment, no other processes, no files to
    write. It never takes much longer than `limits.wall_seconds`. Raises RequestError if the kernel cannot
    confine it, and EtudeError if no process can be started.
    """
    return await _run(source, None, (), stdin, limits or Limits())


async def call_function(
    source: str, function: str, calls: Sequence[Sequence[Any]], *, limits: Limits | None = None
) -> SandboxResult:
    """Run a Python program, then call its function, or its class `Solution`'s, with each of `calls`.

    One process makes all calls. Arguments and values are JSON. If a call raises, only that call has an error
    (`SandboxResult.returned`), and the status stays `ok`. Otherwise like `run_program`.
    """
    return await _run(source, function, calls, "", limits or Limits())


async def _run(
    source: str, function: str | None, calls: Sequence[Sequence[Any]], stdin: str, limits: Limits
) -> SandboxResult:
    job = {
        "source": source,
        "function": function,
        "calls": [list(call) for call in calls],
        "libraries": sorted({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}),
        "limits": asdict(limits),
        "parent": os.getpid(),
    }
    given = json.dumps(job).encode()
    given = b"%12d" % len(given) + given + stdin.encode("utf-8", "surrogateescape")
    # Not asyncio's own processes: a task that is cancelled while it starts one may never end.
    cancelled = threading.Event()
    running = _threads().submit(_run_process, given, limits, cancelled)
    result = asyncio.wrap_future(running)
    try:
        ended = await asyncio.shield(result)
    except asyncio.CancelledError:
        cancelled.set()
        if not running.cancel():
            await asyncio.wait([result], timeout=_GRACE_SECONDS)
        raise
    reports = []
    for line in ended.reports.splitlines():
        try:
            reports.append(_Report.model_validate(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    if not reports and not ended.is_late:
        shown = ended.reports.decode(errors="replace").strip()[-500:]
        raise EtudeError(f"the sandbox did not start (exit status {ended.code}): {shown or 'no report'}")
    if reports and reports[0].unconfined is not None:
        raise RequestError(
            f"the kernel of this machine cannot confine programs: {reports[0].unconfined}; the sandbox needs "
            "Linux 6.2 or newer, with Landlock and seccomp"
        )
    status, reason = _status(ended, reports, limits)
    results = dict[int, Returned]()
    for report in reports:
        if report.call is not None:
            results.setdefault(report.call, Returned(report.value, report.error))
    # Up to the first call that did not finish.
    done = next((index for index in range(len(calls)) if index not in results), len(calls))
    output = ended.output[: limits.output_bytes].decode(errors="replace")
    return SandboxResult(
        status, reason, output, tuple(results[index] for index in range(done)), ended.seconds
    )


class _Report(BaseModel, extra="ignore", strict=True):
    """A line from inside. The program may have written it, so nothing in it is trusted."""

    unconfined: str | None = None
    call: int | None = None
    value: Any = None
    error: str | None = None
    end: Status | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Exit:
    """The process's output and its end."""

    reports: bytes
    output: bytes
    code: int | None
    """The exit status, or minus the number of the signal that ended it."""
    is_late: bool
    """Whether it was killed because its time was over."""
    seconds: float


def _status(ended: _Exit, reports: Sequence[_Report], limits: Limits) -> tuple[Status, str]:
    if ended.is_late:
        return "timeout", f"it did not finish within {limits.wall_seconds:g} s"
    if max(len(ended.output), len(ended.reports)) > limits.output_bytes:
        return "error", f"it wrote more than {limits.output_bytes} bytes of output"
    killed = ended.code == -signal.SIGKILL
    if ended.code == -signal.SIGXCPU or (killed and ended.seconds > limits.cpu_seconds):
        return "timeout", f"it did not finish within {limits.cpu_seconds} s of CPU time"
    if killed:
        return "memory", "it was killed, most likely because it ran out of memory"
    for report in reports:
        if report.end is not None:
            return report.end, report.reason
    if ended.code is None or ended.code < 0:
        return "error", f"it crashed with signal {-(ended.code or 0)}"
    return ("error", f"it exited with status {ended.code}") if ended.code else ("ok", "")


_START = "import sys; sys.path += sys.argv[1:]; from confinement import main; main()"
_OPTIONS = ("-s", "-P", "-S", "-B", "-X", "utf8", "-c", _START)
"""Isolated except for one variable. `-I` would ignore it, and runs would not repeat exactly."""
_ENVIRONMENT = {"PYTHONHASHSEED": "0"}

_LOOK_SECONDS = 0.05
_GRACE_SECONDS = 2.0


@functools.cache
def _threads() -> ThreadPoolExecutor:
    # Threads live as long as the program: a process is set to die with the thread that started it. As many
    # processes run at a time as there are processors, so that none uses up another's time.
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="sandbox")


def _run_process(given: bytes, limits: Limits, cancelled: threading.Event) -> _Exit:
    """Start the inside of the sandbox, and wait until it ends, or for `limits.wall_seconds`."""
    with (
        tempfile.NamedTemporaryFile(prefix="etude-sandbox-") as file,
        tempfile.TemporaryFile() as output,
        tempfile.NamedTemporaryFile(prefix="etude-sandbox-") as reports,
    ):
        file.write(given)
        file.flush()
        started = time.monotonic()
        try:
            # Opened again, so that the program can only read its input, and only add to the reports.
            with Path(file.name).open("rb") as stdin, Path(reports.name).open("ab") as stderr:
                process = subprocess.Popen(
                    (sys.executable, *_OPTIONS, *_modules()),
                    stdin=stdin,
                    stdout=output,
                    stderr=stderr,
                    cwd="/",
                    env=_ENVIRONMENT,
                    start_new_session=True,
                )
        except OSError as error:
            raise EtudeError(f"the sandbox cannot start {sys.executable!r}: {error}") from error
        try:
            is_late = not _wait(process, started + limits.wall_seconds, cancelled)
        finally:
            # The group outlives its leader while it has any process, and is gone otherwise.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_SECONDS)
        seconds = time.monotonic() - started
        output.seek(0)
        return _Exit(reports.read(), output.read(), process.returncode, is_late, seconds)


def _wait(process: subprocess.Popen[bytes], deadline: float, cancelled: threading.Event) -> bool:
    """Wait until a process ends. Returns False if it must be killed first."""
    poll, descriptor = select.poll(), os.pidfd_open(process.pid)
    poll.register(descriptor, select.POLLIN)
    try:
        while not poll.poll(_LOOK_SECONDS * 1000):
            if time.monotonic() >= deadline or cancelled.is_set():
                return False
    finally:
        os.close(descriptor)
    return True


@functools.cache
def _modules() -> tuple[str, ...]:
    """Return the folders of the inside's imports. Raises RequestError if they are missing."""
    if sys.platform != "linux":
        raise RequestError("the sandbox needs Linux: run Etude in a container, or check programs elsewhere")
    found = [importlib.util.find_spec(name) for name in ("pyseccomp", "landlock")]
    if None in found:
        raise MissingExtraError("running untrusted programs", "sandbox")
    origins = [Path(spec.origin) for spec in found if spec is not None and spec.origin is not None]
    folders = [each.parent if each.name != "__init__.py" else each.parents[1] for each in origins]
    return tuple(dict.fromkeys(map(str, (Path(__file__).parent, *folders))))
