"""The errors that a user can meet.

Every error says what happened, where, and what to do next. The class sets the exit code of the command line:
2 if the request was wrong (nothing was tried), 1 if the work failed.
"""

import difflib
import json
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from etude.core.secrets import mask_secrets


class EtudeError(Exception):
    """The work failed. Exit code 1.

    Secrets in the message are masked, since it may quote other programs.
    """

    exit_code = 1

    def __str__(self) -> str:
        return mask_secrets(super().__str__())


class RequestError(EtudeError):
    """The request itself is wrong, and nothing was tried. Exit code 2."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The wrong field of an API request, if there is one."""


class ConfigError(RequestError):
    """A config file is wrong. The message starts with `file:line:column` if they are known."""

    def __init__(
        self,
        message: str,
        *,
        path: Path | str | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        where = ":".join(str(part) for part in (path, line, column) if part is not None)
        super().__init__(f"{where}: {message}" if where else message)
        self.path = path
        self.line = line
        self.column = column


class DatasetError(RequestError):
    """A dataset cannot be read, or a row of it is wrong. The message names the file and the row."""


def install_command(extra: str) -> str:
    """Return the command that adds the extra to this environment: `pip install -e '/home/me/etude[plots]'`,
    with the source that Etude was installed from, a checkout or a file (PEP 610)."""
    try:
        origin = json.loads(distribution("etude").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    source = unquote(urlsplit(url).path) if url.startswith("file:") else "etude"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{shlex.quote(f'{source}[{extra}]')}"


class MissingExtraError(RequestError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}'. Install it: {install_command(extra)}")


def require_extra(module: str, what: str, extra: str) -> None:
    """Raise MissingExtraError if a module is not installed."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:  # A package above it is not installed.
        is_there = False
    if not is_there:
        raise MissingExtraError(what, extra)


class CapabilityError(RequestError):
    """A config asks the chosen backend for something that it cannot do."""


class StoreError(EtudeError):
    """The run folder cannot be read or written (disk full, other version, in use)."""


class EngineError(EtudeError):
    """A model call failed for good: no retries are left, or the request is impossible."""


class EngineAway(EngineError):
    """The engine is not available at the moment. A later retry may succeed."""


class ImpossibleCall(EngineError):
    """The request itself is wrong: too long, or of a kind that the model does not accept."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The wrong field of a chat completion's request, if there is one."""


class PromptTooLong(ImpossibleCall):
    """The prompt leaves no room for an answer in the model's context."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)


class ToolError(EtudeError):
    """A tool has no answer: its server cannot be started, died, hung, or broke the protocol."""


class EpisodeError(EtudeError):
    """An episode failed: its workflow raised, timed out or returned nothing usable."""


class EnvironmentAway(EpisodeError):
    """Something that an episode needs besides its models was unavailable: a sandbox, tool server or network.
    The agent did not cause it, and a retry may succeed."""


class LoopStopped(EtudeError):
    """Code in this process stopped the event loop, or cancelled the work in it."""


class StalledError(EtudeError):
    """Nothing in a run has moved for longer than its limit."""


class ErrorBudgetExceeded(EtudeError):
    """More episodes or scores failed than the run allows."""


class BudgetReached(EtudeError):
    """A run reached a limit of its budget and stopped. Everything is kept. Exit code 3."""

    exit_code = 3

    def __init__(self, message: str, *, override: str) -> None:
        super().__init__(message)
        self.override = override
        """The setting that lets `etude resume` continue, as `-o` takes it."""


class RunStopped(EtudeError):
    """An alarm ended a run. Its trainer must do nothing more."""


class TrainingError(EtudeError):
    """A training job failed, or a run ended without training on anything."""


class JobStillRunning(TrainingError):
    """A training job took too long and could not be cancelled. It may still make new weights."""


class BackendError(EtudeError):
    """A training backend gave no usable answer. Jobs there continue, and nothing is lost."""

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary
        """Whether a later retry may succeed."""


E = TypeVar("E", bound=EtudeError)


def find_class(name: str, kind: type[E]) -> type[E] | None:
    """Return the class of this name among `kind` and all its subclasses, custom engines' included."""
    if kind.__name__ == name:
        return kind
    return next(filter(None, (find_class(name, each) for each in kind.__subclasses__())), None)


_SHOWN_CHARACTERS = 20_000
_LONGEST_SECRET = 10_000
"""Characters after the cut that are also masked, so that no secret is cut in two and half shown."""


def first_error(error: BaseException) -> BaseException:
    """Return the error itself, or the first one in an exception group, such as a TaskGroup's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def error_words(error: BaseException) -> str:
    """Return `Type: message` of an error, with the message from `safe_error_text`. Of an exception group, it
    is the first error inside."""
    error = first_error(error)
    return f"{type(error).__name__}: {safe_error_text(error)}"


def safe_error_text(error: BaseException) -> str:
    """Return the message of any error, secrets masked, also if it is endless or raises an error itself."""
    try:
        text = str(error)
    except BaseException as problem:  # noqa: BLE001  its `__str__` is user code
        return f"(its text cannot be read: {type(problem).__name__})"
    count = len(text)
    text = mask_secrets(text[: _SHOWN_CHARACTERS + _LONGEST_SECRET])
    text = text.encode("utf-8", "backslashreplace").decode()  # Half of a surrogate pair cannot be printed.
    return f"{text[:_SHOWN_CHARACTERS]} … ({count} characters)" if count > _SHOWN_CHARACTERS else text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, with the next one if it ends in a colon, or its type if
    there is none."""
    lines = safe_error_text(error).strip().splitlines() or [type(error).__name__]
    return " ".join(line.strip() for line in lines[: 1 + lines[0].rstrip().endswith(":")])


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """Return the choice that `name` most likely means, or None if none is close."""
    by_folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def alternatives(name: str, choices: Iterable[str], *, otherwise: str = "none") -> str:
    """Return the end of a sentence about a wrong name: `; did you mean 'x'? Allowed: x, y`, or `otherwise`
    without choices."""
    allowed = list(dict.fromkeys(choices))
    close = nearest(name, allowed)
    listing = f"Allowed: {', '.join(allowed) or otherwise}"
    return f"; did you mean '{close}'? {listing}" if close else f". {listing}"
