"""What goes wrong between a client and a language-model server."""

from __future__ import annotations

from etude.core.errors import BackendError


class LanguageModelClientError(BackendError):
    """The server gave no usable answer."""


class BadResponseError(LanguageModelClientError):
    """The server cannot be reached, refused the request, or answered something else."""


class ClientTimeoutError(LanguageModelClientError, TimeoutError):
    """The server did not answer, or was not ready, in time."""

    def __init__(self, message: str) -> None:
        super().__init__(message, temporary=True)


class ServerVersionError(LanguageModelClientError):
    """The server is of another major version."""

    def __init__(self, where: str, theirs: str, ours: str) -> None:
        super().__init__(
            f"the server at {where} is etude {theirs}, and this is etude {ours}: another major version. "
            f"Install etude {theirs} here, or {ours} there"
        )
        self.theirs, self.ours = theirs, ours


class EngineClientError(LanguageModelClientError):
    """The server's engine does not run."""

    def __init__(self, status: str, reason: str | None) -> None:
        super().__init__(f"the server's engine is {status}" + (f": {reason}" if reason else ""))
        self.status = status
