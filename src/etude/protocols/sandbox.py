"""Running untrusted Python: a whole program, or calls of one of its functions."""

from __future__ import annotations

import json
import signal
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from etude.core.errors import EtudeError, RequestError
from etude.protocols.sandbox_process import Exit, Limits, run_process

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
        "limits": {"cpu_seconds": limits.cpu_seconds, "memory_bytes": limits.memory_bytes},
    }
    ended = await run_process(json.dumps(job).encode(), stdin.encode("utf-8", "surrogateescape"), limits)
    reports = []
    for line in ended.reports.splitlines():
        try:
            reports.append(_Report.model_validate(json.loads(line)))
        except (ValueError, RecursionError):
            continue
    if not reports and ended.stopped is None:
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
    returned, output = tuple(results[index] for index in range(done)), ended.output.decode(errors="replace")
    return SandboxResult(status, reason, output, returned, ended.seconds)


class _Report(BaseModel, extra="ignore", strict=True):
    """A line from inside. The program may have written it, so nothing in it is trusted."""

    unconfined: str | None = None
    call: int | None = None
    value: Any = None
    error: str | None = None
    end: Status | None = None
    reason: str = ""


def _status(ended: Exit, reports: Sequence[_Report], limits: Limits) -> tuple[Status, str]:
    if ended.stopped == "time":
        return "timeout", f"it did not finish within {limits.wall_seconds:g} s"
    if ended.stopped == "output":
        return "error", f"it wrote more than {limits.output_bytes} bytes of output"
    killed = ended.code == -signal.SIGKILL
    if ended.code == -signal.SIGXCPU or (killed and ended.seconds > limits.cpu_seconds):
        return "timeout", f"it did not finish within {limits.cpu_seconds} s of CPU time"
    if killed:
        return "memory", "it was killed, most likely because it ran out of memory"
    if ended.code is None or ended.code < 0:
        return "error", f"it crashed with signal {-(ended.code or 0)}"
    if ended.code > 0:
        return "error", f"it exited with status {ended.code}"
    last = next((report for report in reversed(reports) if report.end is not None), None)
    # Without a last report, it left through `os._exit(0)`.
    return ("ok", "") if last is None or last.end is None else (last.end, last.reason)
