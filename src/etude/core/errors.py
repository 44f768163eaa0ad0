"""The errors a user can meet.

Every error says what happened, where, and what to do next. The class fixes the exit code of the
command line: 2 when the request was wrong (nothing was tried), 1 when the work failed.
"""

from __future__ import annotations

from pathlib import Path


class EtudeError(Exception):
    """The work failed. Exit code 1."""

    exit_code = 1


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


class MissingExtraError(RequestError):
    """An optional dependency is not installed."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra '{extra}'. Install it: pip install 'etude[{extra}]'")


class CapabilityError(RequestError):
    """A config asks the chosen backend for something that it cannot do."""


class StoreError(EtudeError):
    """The run folder cannot be read or written (disk full, other version, in use)."""


class EngineError(EtudeError):
    """A model call failed for good: retries are spent or the request is impossible."""


class EngineAway(EngineError):
    """The engine is not there at the moment: another try later may do better."""


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


class ErrorBudgetExceeded(EtudeError):
    """More episodes or scores failed than the run allows."""


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
