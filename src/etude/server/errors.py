"""Errors on the wire, always OpenAI's error object, and routes whose bodies are JSON within limits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from etude.core.errors import (
    EngineAway,
    EngineError,
    EtudeError,
    ImpossibleCall,
    RequestError,
    StoreError,
)
from etude.core.json_text import read_json
from etude.core.threads import beside_loop
from etude.wire.gateway import code_of
from etude.wire.http_server import ApiError, in_one_line
from etude.wire.sampling import problems_of

_LOG = logging.getLogger("etude.server")

_RETRY_SECONDS = 5

EXPECTED = (HTTPException, RequestValidationError, EtudeError, DBAPIError)
"""Errors that are no failure of the server's: nothing but their answer is made of them."""


def not_found(kind: str, name: str, *, param: str, code: str) -> ApiError:
    """The answer about something that is not there."""
    return ApiError(404, f"there is no {kind} {name!r}", param=param, code=code)


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error with an error object."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return api_error(request, error).response(request.url.path)

    for kind in (*EXPECTED, Exception):
        app.add_exception_handler(kind, answer)


def api_error(request: Request, error: Exception) -> ApiError:
    """The answer to an error; what is behind one of the server's own is in its log."""
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
            message, param = problems_of(error.errors())
            return ApiError(400, message, param=param, code="invalid_value")
        case RequestError():
            return ApiError(400, str(error), param=error.param, code="invalid_value")
        case ImpossibleCall():
            return ApiError(400, str(error), param=error.param, code=code_of(error))
        case DBAPIError():
            _LOG.error("%s: the database: %s", where, in_one_line(error))
            message = "the server's database does not answer; its log has the reason"
            return ApiError(503, message, code="storage")
        case EtudeError():
            _LOG.warning("%s: %s", where, " ".join(str(error).split()))
            if isinstance(error, StoreError):
                return ApiError(507, "the server's disk does not take or give the data; see its log")
            if isinstance(error, EngineAway):
                message, code = str(error), "engine_unavailable"
                return ApiError(503, message, code=code, retry_after=_RETRY_SECONDS)
            return ApiError(500 if isinstance(error, EngineError) else 503, str(error))
    # It is raised on, and logged by `RequestChecks`.
    return ApiError(500, "the server failed at this request; its log has the reason")


class JsonRequest(Request):
    """A request whose JSON is read within limits, and beside the event loop where there is much of it."""

    async def json(self) -> Any:
        """The body's value. Raises ApiError."""
        body = await self.body()
        try:
            return await beside_loop(len(body), read_json, body)
        except ValueError as error:
            raise ApiError(400, f"the request is not JSON: {error}", code="invalid_value") from error


class JsonRoute(APIRoute):
    """A route that takes such requests, to be named as the `route_class` of a router."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_json(request: Request) -> Response:
            return await handle(JsonRequest(request.scope, request.receive))

        return handle_json
