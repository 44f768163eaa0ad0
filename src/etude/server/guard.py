"""Access, size limits, error answers and metrics, which all routes share."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from sqlalchemy.exc import DBAPIError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Scope

from etude.core.errors import EngineAway, EngineError, EtudeError, ImpossibleCall, RequestError, StoreError
from etude.server.settings import ServerSettings
from etude.wire.gateway import choose_code
from etude.wire.http_server import (
    USUAL_BODY,
    ApiError,
    RequestChecks,
    in_one_line,
    is_key,
    require_own_name,
    shown_key,
)
from etude.wire.request_body import describe_problems

_LOG = logging.getLogger("etude.server")

_RETRY_SECONDS = 5


async def answer_error(request: Request, error: Exception) -> JSONResponse:
    """Answer an error with an error object."""
    return api_error(request, error).response(request.url.path)


# Any other Exception is also raised again, as a failure of the server.
HANDLED = (HTTPException, RequestValidationError, EtudeError, DBAPIError, Exception)
"""The errors that `answer_error` answers."""


def api_error(request: Request, error: Exception) -> ApiError:
    """Return the answer to an error. The log has the cause of the server's own errors."""
    where = f"{request.method} {request.url.path}"
    match error:
        case ApiError():
            return error
        case HTTPException():
            code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
            message = f"there is no {where} here; see /docs" if code else error.detail
            answer = ApiError(error.status_code, message, code=code)
            answer.headers = error.headers
            return answer
        case RequestValidationError():
            message, param = describe_problems(error.errors())
            if param is None and error.errors()[0]["type"] == "model_attributes_type":
                found = request.headers.get("content-type", "none")
                message += f"; send a JSON object with `Content-Type: application/json`, found {found}"
            return ApiError(400, message, param=param, code="invalid_value")
        case RequestError() | ImpossibleCall():
            return ApiError(400, str(error), param=error.param, code=choose_code(error))
        case DBAPIError():
            _LOG.error("%s: the database: %s", where, in_one_line(error))
            message = "the server's database does not answer; its log has the reason"
            return ApiError(503, message, code="storage")
        case EtudeError():
            _LOG.warning("%s: %s", where, " ".join(str(error).split()))
            if isinstance(error, StoreError):
                return ApiError(507, "the server cannot read or write its disk; its log has the reason")
            if isinstance(error, EngineAway):
                message, code = str(error), "engine_unavailable"
                return ApiError(503, message, code=code, retry_after=_RETRY_SECONDS)
            return ApiError(500 if isinstance(error, EngineError) else 503, str(error))
    # The error is raised again, and `RequestChecks` logs it.
    return ApiError(500, "the server failed to answer this request; its log has the reason")


_OPEN = frozenset({"/health", "/version", "/docs", "/openapi.json"})
"""Paths without a key, because they reveal nothing."""
_UPLOADS = "/v1/files"
"""The path whose bodies are training data."""
MAX_FILE = 512 * 2**20
"""The limit of an uploaded file's size in bytes."""
_MULTIPART_BYTES = 64 * 1024
"""Bytes that an upload's form may take besides the file."""


def guard_app(app: ASGIApp, settings: ServerSettings) -> RequestChecks:
    """Return the application behind checks of each request's key, host name and size."""

    def max_body(path: str) -> int:
        return MAX_FILE + _MULTIPART_BYTES if path.rstrip("/") == _UPLOADS else USUAL_BODY

    def check(scope: Scope, headers: Headers) -> None:
        """Raise ApiError if the request is not allowed."""
        if scope["path"] in _OPEN:
            return
        if settings.api_key is None:
            require_own_name(headers, settings.host)
        elif not is_key(shown_key(headers), settings.api_key):
            raise ApiError(401, "the API key is missing or wrong", code="invalid_api_key")

    return RequestChecks(app, check, max_body=max_body)


class Metrics:
    """The counters of one server, and gauges that are computed when read."""

    def __init__(self, job_counts: Callable[[], Mapping[str, int]], sequences: Callable[[], float]) -> None:
        """`job_counts` returns the number of jobs by status."""
        self.registry = CollectorRegistry()
        self._prompt = Counter("etude_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._sampled = Counter("etude_sampled_tokens", "Tokens sampled.", registry=self.registry)
        gauge = Gauge("etude_sequences", "Sequences in progress and waiting.", registry=self.registry)
        gauge.set_function(sequences)
        self._jobs = Gauge("etude_jobs", "Training jobs.", ["status"], registry=self.registry)
        self._job_counts = job_counts

    def count_tokens(self, prompt: int, sampled: int) -> None:
        """Count the tokens of a completion."""
        self._prompt.inc(prompt)
        self._sampled.inc(sampled)

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        self._jobs.clear()
        for status, count in self._job_counts().items():
            self._jobs.labels(status).set(count)
        return generate_latest(self.registry)


_AT_ONCE_SECONDS = 0.02

T = TypeVar("T")


async def cancel_on_disconnect(request: Request, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled when the client hangs up.

    Raises ApiError in that case, only for the log.
    """
    limit = asyncio.timeout(None)

    async def listen() -> None:
        # Fast answers are not watched, because listening costs as much as reading the request.
        await asyncio.sleep(_AT_ONCE_SECONDS)
        while (await request.receive())["type"] != "http.disconnect":
            pass
        limit.reschedule(asyncio.get_running_loop().time())

    listening = asyncio.create_task(listen())
    try:
        async with limit:
            return await work
    except TimeoutError:
        if limit.expired():
            raise ApiError(499, "the client hung up") from None
        raise
    finally:
        listening.cancel()
