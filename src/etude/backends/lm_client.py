"""A client for the parts of a language-model server that OpenAI's API lacks: engine, version, health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, TypeVar

from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, SecretStr, ValidationError

from etude.core.errors import BackendError
from etude.core.secrets import keep_secret
from etude.wire.retries import USUAL, Retryable, RetryPolicy, RetryReason, describe, to_failure, with_retries

if TYPE_CHECKING:
    import httpx

FREE_ENGINE = "etude_free_engine"
"""Metadata key of a job: with "true", the server stops its engine while the job trains."""
_LOG = logging.getLogger("etude.backends.lm_client")
_POLL = 0.5
_ONCE = RetryPolicy(retries=0)
Model = TypeVar("Model", bound=BaseModel)


class LanguageModelClientError(BackendError):
    """The server gave no usable answer."""

    def __init__(self, message: str, again: RetryReason | None = None) -> None:
        """`again` is the reason for a retry. None if a retry cannot help."""
        super().__init__(message, temporary=isinstance(self, TimeoutError))
        self.again = again


class BadResponseError(LanguageModelClientError):
    """The server cannot be reached, refused the request, or sent an unexpected answer."""


class ClientTimeoutError(LanguageModelClientError, TimeoutError):
    """The server did not answer, or was not ready, in time."""


class ServerVersionError(LanguageModelClientError):
    """The server has another major version."""


class _Answer(BaseModel, frozen=True, extra="ignore"):
    """An answer of the server. Newer servers may add fields."""


class ServerVersion(_Answer):
    """`GET /version`."""

    version: str


class EngineStatus(_Answer):
    """`GET /engine/status`."""

    status: Literal["running", "stopping", "stopped"] | str
    engine: str | None = None
    """The kind of engine."""
    models: tuple[str, ...] = ()
    """The models in memory."""
    away_for_jobs: bool = False
    """Whether it is stopped while jobs train. It restarts afterwards."""


class Algorithms(_Answer):
    """`GET /v1/fine_tuning/algorithms`."""

    data: list[str]


class LanguageModelClient:
    """A client that controls a language-model server's engine. Jobs and completions use the OpenAI SDK."""

    def __init__(
        self,
        base_url: str,
        api_key: SecretStr | str | None = None,
        *,
        timeout: float = 60.0,
        warn: Callable[[str], None] = _LOG.warning,
        transport: httpx.AsyncBaseTransport | None = None,
        policy: RetryPolicy = USUAL,
    ) -> None:
        """`base_url` may end in `/v1`. `timeout` is in seconds per request. Nothing is sent yet.

        `policy` controls the retries of requests.
        """
        import httpx

        from etude.wire.http_answers import UNCOMPRESSED, limit_answer

        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        key = (api_key.get_secret_value() if isinstance(api_key, SecretStr) else api_key) or ""
        keep_secret(key)
        headers = UNCOMPRESSED | ({"authorization": f"Bearer {key}"} if key else {})
        self._timeout = timeout
        self._warn = warn
        self._warned = False
        self._policy = policy
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            transport=transport,
            event_hooks={"response": [limit_answer]},
        )

    async def get_server_version(self) -> str:
        """Return the server's version of Etude."""
        return (await self._ask("/version", ServerVersion)).version

    async def algorithms(self) -> list[str]:
        """Return the algorithms that jobs can name: shipped ones and those the server was started with."""
        return (await self._ask("/v1/fine_tuning/algorithms", Algorithms)).data

    async def get_engine_status(self) -> EngineStatus:
        """Return whether the engine runs, and with which models."""
        return await self._ask("/engine/status", EngineStatus)

    async def start_engine(self, *, timeout: float = 300.0) -> EngineStatus:  # noqa: ASYNC109
        """Start the engine, and wait until it runs. Time in which jobs keep the engine stopped does not
        count.

        Raises BadResponseError with the reason if it cannot start, ClientTimeoutError if it does not run
        within `timeout` seconds.
        """
        await self._post("/engine/start", timeout)
        deadline = time.monotonic() + timeout
        while True:
            engine = await self.get_engine_status()
            if engine.status == "running":
                return engine
            if engine.away_for_jobs:
                deadline = time.monotonic() + timeout
            elif time.monotonic() >= deadline:
                raise ClientTimeoutError(
                    f"the engine at {self.base_url} is {engine.status} after {timeout:g} s"
                )
            await asyncio.sleep(min(_POLL, timeout))

    async def stop_engine(self, *, timeout: float = 300.0) -> None:  # noqa: ASYNC109
        """Stop the engine, so that training has the device. A stopped engine is not an error."""
        await self._post("/engine/stop", timeout)

    async def wait_for_ready(self, timeout: float = 300.0) -> None:  # noqa: ASYNC109  # the reference's name
        """Wait until the server answers, and check its version. The log says why the client waits.

        Raises ClientTimeoutError after `timeout` seconds, ServerVersionError.
        """
        deadline, told = time.monotonic() + timeout, None
        while (problem := await self.problem(max(_POLL, deadline - time.monotonic()))) is not None:
            if problem != told:
                told = problem
                self._warn(
                    f"waiting up to {timeout:g} s for a language-model server at {self.base_url}: {problem}"
                )
            left = deadline - time.monotonic()
            if left <= 0:
                raise ClientTimeoutError(
                    f"no language-model server answers at {self.base_url} after {timeout:g} s ({problem}); "
                    "start one: etude serve"
                )
            await asyncio.sleep(min(_POLL, left))
        await self.validate_server_version()

    async def problem(self, seconds: float | None = None, *, tries_again: bool = False) -> str | None:
        """Return why the server is unavailable, or None. `tries_again` retries as other requests do."""
        policy = self._policy if tries_again else _ONCE
        try:
            await with_retries(lambda: self._attempt("GET", "/health", seconds), policy=policy)
        except LanguageModelClientError as error:
            return str(error)
        return None

    async def validate_server_version(self) -> None:
        """Raise ServerVersionError for another major version. Warn once about another minor version."""
        theirs, ours = await self.get_server_version(), version("etude")
        try:
            server, client = Version(theirs), Version(ours)
        except InvalidVersion as error:
            raise BadResponseError(f"{self.base_url} says that its version is {theirs!r:.40}") from error
        versions = f"the server at {self.base_url} is etude {theirs}, and this is etude {ours}"
        if server.major != client.major:
            raise ServerVersionError(
                f"{versions}: another major version. Install etude {theirs} here, or {ours} there"
            )
        if server.minor != client.minor and not self._warned:
            self._warned = True
            self._warn(f"{versions}: features that only one of them has will not work")

    async def close(self) -> None:
        """Close the connections. Calling it twice is fine."""
        await self._http.aclose()

    async def _ask(self, path: str, model: type[Model]) -> Model:
        async def ask() -> Model:
            response = await self._attempt("GET", path, None)
            try:
                return model.model_validate_json(response.content)
            except ValidationError as error:
                wrong = error.errors()[0]
                field = ".".join(map(str, wrong["loc"])) or "body"
                raise BadResponseError(
                    f"GET {self.base_url}{path} answered something else ({field}: {wrong['msg']}); is it an "
                    "etude server?",
                    RetryReason("malformed"),
                ) from error

        return await with_retries(ask, policy=self._policy)

    async def _post(self, path: str, seconds: float) -> None:
        """Send a request that has the same effect when repeated."""
        await with_retries(lambda: self._attempt("POST", path, seconds), policy=self._policy)

    async def _attempt(self, method: str, path: str, seconds: float | None) -> httpx.Response:
        import httpx

        where = f"{method} {self.base_url}{path}"
        most = self._timeout if seconds is None else seconds
        try:
            async with asyncio.timeout(most):  # In total: httpx limits only single pieces.
                response = await self._http.request(method, path, timeout=most)
        except (httpx.TimeoutException, TimeoutError) as error:
            later = RetryReason("timeout") if method == "GET" else None
            raise ClientTimeoutError(f"{where}: no answer in time", later) from error
        except httpx.RequestError as error:
            raise BadResponseError(f"{where}: {describe(error)}", RetryReason("connection")) from error
        if response.is_success:
            return response
        failure = to_failure(response.status_code, response.headers, response.content)
        later = failure.again if isinstance(failure, Retryable) else None
        raise BadResponseError(f"{where} answered {failure}", later)
