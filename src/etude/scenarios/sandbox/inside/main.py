"""Runs untrusted code in this process, and reports how it ended.

The job comes first on standard input, and what follows it is the program's own. Reports go out on what
was standard error, one JSON object to a line: first that this process is confined, then what calls gave,
last how it ended. What the program does to the reports only makes its own result worse.
"""

from __future__ import annotations

import atexit
import builtins
import io
import json
import linecache
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable, Mapping
from typing import Any

from etude.scenarios.sandbox.inside.confine import confine

FILE = "program.py"

_HEADER_BYTES = 12
_ENDED = 0


def main() -> None:
    """Never returns."""
    job: dict[str, Any] = json.loads(_read_exactly(int(_read_exactly(_HEADER_BYTES))))
    report = _report_to(os.dup(2))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    try:
        confine(job["limits"], job["libraries"])
    except OSError as error:
        report({"unconfined": str(error)})
        os._exit(_ENDED)
    report({"unconfined": None})
    failed = _failures_of_threads()
    end = _end_of(lambda: _run(job, report))
    report(_end_of(lambda: _finish(failed)) if end["end"] == "ok" else end)
    os._exit(_ENDED)


def _read_exactly(length: int) -> bytes:
    """Not a byte more: the rest is for the program. Raises EOFError when there is less."""
    data = b""
    while len(data) < length:
        part = os.read(0, length - len(data))
        if not part:
            raise EOFError("the job was cut off")
        data += part
    return data


def _report_to(descriptor: int) -> Callable[[Mapping[str, Any]], None]:
    # Bound now, so that a program that changes these modules does not change the reports by mistake.
    write, dumps = os.write, json.dumps

    def report(message: Mapping[str, Any]) -> None:
        line = dumps(message).encode() + b"\n"
        while line:
            line = line[write(descriptor, line) :]

    return report


def _run(job: Mapping[str, Any], report: Callable[[Mapping[str, Any]], None]) -> None:
    source = job["source"]
    linecache.cache[FILE] = (len(source), None, source.splitlines(keepends=True), FILE)
    module = types.ModuleType("__main__")
    module.__dict__["__file__"] = FILE
    sys.modules["__main__"] = module
    sys.path[:] = [path for path in sys.path if path and path not in sys.argv]
    sys.argv = [FILE]
    # `site`, which brings these, is not loaded.
    builtins.__dict__.update(exit=sys.exit, quit=sys.exit)
    exec(compile(source, FILE, "exec"), module.__dict__)
    if job["function"] is not None:
        _call_all(_find(module, job["function"]), job["calls"], report)


def _find(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """The function of that name, or the method of a class called Solution, as some puzzles want it."""
    holder = module if hasattr(module, name) else getattr(module, "Solution", None)
    if holder is None:
        raise NameError(f"there is no function '{name}'")
    attribute = getattr(holder() if isinstance(holder, type) else holder, name, None)
    if not callable(attribute):
        raise NameError(f"there is no function '{name}'")
    function: Callable[..., Any] = attribute
    return function


def _call_all(
    function: Callable[..., Any], calls: list[list[Any]], report: Callable[[Mapping[str, Any]], None]
) -> None:
    for index, arguments in enumerate(calls):
        try:
            value = function(*arguments)
            try:
                report({"call": index, "value": value})
            except (TypeError, ValueError, RecursionError):
                raise TypeError(f"the value is a {type(value).__name__} that JSON cannot keep") from None
        except (MemoryError, PermissionError, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - it is untrusted code
            report({"call": index, "error": _describe(error)})


def _failures_of_threads() -> list[BaseException]:
    """The list of exceptions that threads will have raised, in their order."""
    failed: list[BaseException] = []

    def note(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            failed.append(arguments.exc_value)

    threading.excepthook = note
    return failed


def _finish(failed: list[BaseException]) -> None:
    """End as the interpreter ends a program: wait for threads, run hooks, flush."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(sys.stdout, io.TextIOBase):
        sys.stdout.flush()
    if failed:
        raise failed[0]


def _end_of(step: Callable[[], None]) -> dict[str, str]:
    try:
        step()
    except MemoryError:
        return {"end": "memory", "reason": "it asked for more memory than it may have"}
    except PermissionError as error:
        return {"end": "refused", "reason": _describe(error)}
    except SystemExit as error:
        if error.code in (None, 0):
            return {"end": "ok", "reason": ""}
        return {"end": "error", "reason": f"it exited with status {error.code!r}"}
    except BaseException as error:  # noqa: BLE001 - it is untrusted code
        return {"end": "error", "reason": _describe(error)}
    return {"end": "ok", "reason": ""}


def _describe(error: BaseException) -> str:
    """`Type: message (line 3: the line)`, of the innermost line of the program."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == FILE]
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1:]
    what = text[0] if text else type(error).__name__
    return f"{what} (line {lines[-1].lineno}: {lines[-1].line})" if lines else what
