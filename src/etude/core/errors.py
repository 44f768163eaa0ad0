"""The errors a user can meet.

Every error says what happened, where, and what to do next. The class fixes the exit code of the
command line: 2 when the request was wrong (nothing was tried), 1 when the work failed.
"""

import difflib
import json
import shlex
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from etude.core.secrets import masked


class EtudeError(Exception):
    """The work failed. Exit code 1.

    Its text may repeat what others said, and has no secrets.
    """

    exit_code = 1

    def __str__(self) -> str:
        return masked(super().__str__())


class RequestError(EtudeError):
    """The request itself is wrong, and nothing was tried. Exit code 2."""

    exit_code = 2

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field of an API's request that is wrong, where it is one."""


class ConfigError(RequestError):
    """A config file is wrong; the message starts with `file:line:column` when they are known."""

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
    """A dataset cannot be read, or a row of it is wrong; the message names file and row."""


def install_command(extra: str) -> str:
    """The command that adds the extra to this environment: `pip install -e '/home/me/etude[plots]'`.

    It names what Etude was installed from, a checkout or a file (PEP 610), so that it can be typed anywhere.
    """
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


class CapabilityError(RequestError):
    """A config asks the chosen backend for something that it cannot do."""


class StoreError(EtudeError):
    """The run folder cannot be read or written (disk full, other version, in use)."""


class EngineError(EtudeError):
    """A model call failed for good: retries are spent or the request is impossible."""


class EngineAway(EngineError):
    """The engine is not there at the moment: another try later may do better."""


class ModelOut(EngineError):
    """A model gives no answers at all: its key is wrong, its address is dead, there is no such model.

    More calls would fail too, so it ends the run wherever it is raised, also where an agent or an evaluator
    catches it; nothing that was answered is lost. An engine of one's own may raise it.
    """


class ImpossibleCall(EngineError):
    """The request itself is at fault: too long, or of a kind that the model does not take."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        """The field of a chat completion's request that is at fault, where it is one."""


class PromptTooLong(ImpossibleCall):
    """The prompt leaves no room for an answer in the model's context."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param)


class ToolError(EtudeError):
    """A tool has no answer: its server cannot be started, died, hung, or broke the protocol."""


class EpisodeError(EtudeError):
    """An episode failed: its workflow raised, timed out or returned nothing usable."""


class EnvironmentAway(EpisodeError):
    """A thing that an episode needs besides its models was not there: a sandbox, a tool server, a network.

    It is nobody's failure, and another try may do better.
    """


class StalledError(EtudeError):
    """Nothing in a run has moved for longer than it waits."""


class ErrorBudgetExceeded(EtudeError):
    """More episodes or scores failed than the run allows."""


class _Resumable(EtudeError):
    exit_code = 3

    def __init__(self, message: str, *, override: str) -> None:
        super().__init__(message)
        self.override = override
        """The setting with which `etude resume` goes on, as `-o` takes it."""


class BudgetReached(_Resumable):
    """A run is at a limit of its budget, and has stopped with everything kept. Exit code 3."""


class RunPaused(_Resumable):
    """An alarm has paused a run, with everything kept: somebody is to look before it goes on. Exit code 3."""


class RunStopped(EtudeError):
    """An alarm has ended a run: its trainer is to do nothing more."""


class TrainingError(EtudeError):
    """A training job failed, or a run ended without having trained on anything."""


class JobStillRunning(TrainingError):
    """A training job took too long and could not be cancelled: it may still make new weights."""


class BackendError(EtudeError):
    """A training backend gave no usable answer. What runs there goes on: nothing is lost."""

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary
        """Whether asking again later may help."""


_SHOWN_CHARACTERS = 20_000
_LONGEST_SECRET = 10_000
"""Characters beyond the end that are looked at, so that no secret is cut in two and shown by half."""


def words_of(error: BaseException) -> str:
    """`Type: message` of an error, as `text_of` gives it."""
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: BaseException) -> str:
    """The message of an error that may be anybody's: it may be endless, or raise an error itself.

    Secrets in it are masked.
    """
    try:
        text = str(error)
    except Exception as problem:  # noqa: BLE001  its `__str__` is user code
        return f"(its text cannot be had: {type(problem).__name__})"
    count = len(text)
    text = masked(text[: _SHOWN_CHARACTERS + _LONGEST_SECRET])
    return f"{text[:_SHOWN_CHARACTERS]} … ({count} characters)" if count > _SHOWN_CHARACTERS else text


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its kind where it has none."""
    lines = text_of(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice that `name` was most likely meant to be, or None when none is close."""
    by_folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return by_folded[close[0]] if close else None


def alternatives(name: str, choices: Iterable[str], *, otherwise: str = "none") -> str:
    """The end of a sentence about a wrong name: `; did you mean 'x'? Allowed: x, y`.

    `otherwise` is listed when there are no choices.
    """
    allowed = list(dict.fromkeys(choices))
    close = nearest(name, allowed)
    listing = f"Allowed: {', '.join(allowed) or otherwise}"
    return f"; did you mean '{close}'? {listing}" if close else f". {listing}"
