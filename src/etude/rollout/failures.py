"""Why an episode failed, in words."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from etude.core.episode import Failure
from etude.core.errors import EngineAway, EngineError, ImpossibleCall
from etude.wire.gateway import ERROR_HEADER

_CALL_ERRORS = {error.__name__ for error in (EngineError, EngineAway, ImpossibleCall)}

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
    calls = {name for cause in _causes(error) if (name := _call_error(cause)) is not None}
    if not calls:
        return Failure("raised", reason)
    # What no model could answer is the agent's own failure.
    return Failure("call_failed", reason, "agent" if calls == {ImpossibleCall.__name__} else "model")


def _call_error(error: BaseException) -> str | None:
    """The class of the failed call that an error is, or that an OpenAI client's error stands for."""
    if isinstance(error, EngineError):
        return type(error).__name__
    name = _header(error)
    return name if name in _CALL_ERRORS else None


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
