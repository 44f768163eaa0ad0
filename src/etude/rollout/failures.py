"""Why an episode failed, in words."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from etude.core.episode import Failure
from etude.core.errors import EngineError
from etude.inference.gateway import ERROR_HEADER

_PACKAGE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {_PACKAGE, *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))}
)


def failure_of(error: BaseException) -> Failure:
    """The failure that an exception of the workflow stands for: `file:line: Type: message`."""
    if isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # A coroutine cannot raise it: Python puts a RuntimeError in its place.
    kind = type(error).__name__
    where = user_line(error)
    reason = f"{where}: {kind}: {error}" if where else f"{kind}: {error}"
    return Failure("call_failed" if _is_call_failure(error) else "raised", reason)


def _is_call_failure(error: BaseException) -> bool:
    return any(
        isinstance(cause, EngineError) or _header(cause) == EngineError.__name__ for cause in _causes(error)
    )


def _header(error: BaseException) -> str | None:
    """What an OpenAI client's error says about the error behind it."""
    headers = getattr(getattr(error, "response", None), "headers", None)
    if not isinstance(headers, Mapping):
        return None
    found = headers.get(ERROR_HEADER)
    return found if isinstance(found, str) else None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what caused it, and the errors inside exception groups."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        yield cause
        pending.append(cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__))
        if isinstance(cause, BaseExceptionGroup):
            pending.extend(cause.exceptions)


def user_line(error: BaseException) -> str | None:
    """`file:line` of the innermost line that is neither ours nor a library's, else of the innermost."""
    frames = list(reversed(traceback.extract_tb(error.__traceback__)))
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    return next((f"{_short(frame.filename)}:{frame.lineno}" for frame in own or frames), None)


def _short(filename: str) -> str:
    """The path as one would type it here."""
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else filename
