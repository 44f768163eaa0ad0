"""Errors on the wire: always OpenAI's error object."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from sqlalchemy.exc import DBAPIError
from starlette.exceptions import HTTPException

from etude.core.errors import EngineAway, EngineError, EtudeError, RequestError, StoreError

_LOG = logging.getLogger("etude.server")

_RETRY_SECONDS = 5
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


_TYPE_TAG = re.compile(r"(str|int|float|bool|constrained-\w+|(list|dict|literal|function-\w+|nullable)\[.*)$")
"""Pydantic puts the members of a union into an error's place; clients know no such fields."""


class ApiError(HTTPException):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """`param` is the field that is wrong; `retry_after` the seconds until another try may do better."""
        headers = None if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}
        super().__init__(status, message, headers)
        self.param = param
        self.code = code


def not_found(kind: str, name: str, *, param: str, code: str) -> ApiError:
    """The answer about something that is not there."""
    return ApiError(404, f"there is no {kind} {name!r}", param=param, code=code)


def error_object(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """OpenAI's error object; its `type` follows from the status."""
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error with an error object."""
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(RequestValidationError, _of_validation)
    app.add_exception_handler(EtudeError, _of_etude)
    app.add_exception_handler(DBAPIError, _of_database)
    app.add_exception_handler(Exception, _of_anything)


def problems_of(errors: Any) -> tuple[str, str | None]:
    """Pydantic's errors as a sentence, and the first field that is wrong."""
    problems, first = [], None
    for error in errors:
        where = [
            str(part)
            for part in error["loc"]
            if part not in ("body", "query", "path") and not _TYPE_TAG.match(str(part))
        ]
        field = dotted(where)
        first = first or field or None
        text = error["msg"].removeprefix("Value error, ")
        problems.append(f"{field}: {text}" if field else text)
    return "; ".join(dict.fromkeys(problems[:5])), first


def dotted(where: list[str]) -> str:
    """`["messages", "0", "role"]` as `messages[0].role`."""
    text = ""
    for part in where:
        text += f"[{part}]" if part.isdecimal() else f".{part}" if text else part
    return text


def _answer(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    content = error_object(status, message, param=param, code=code)
    return JSONResponse(content, status, dict(headers or {}))


async def _of_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        status, message = error.status_code, str(error.detail)
        return _answer(status, message, param=error.param, code=error.code, headers=error.headers)
    unknown = error.status_code in (404, 405)
    message = f"there is no {request.method} {request.url.path} here; see /docs" if unknown else error.detail
    code = "unknown_url" if unknown else None
    return _answer(error.status_code, message, code=code, headers=error.headers)


async def _of_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    message, param = problems_of(error.errors())
    return _answer(400, message, param=param, code="invalid_value")


async def _of_etude(request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, RequestError):
        return _answer(400, str(error))
    _LOG.warning("%s %s: %s", request.method, request.url.path, error)
    if isinstance(error, StoreError):
        return _answer(507, "the server's disk does not take or give the data; see its log")
    if isinstance(error, EngineAway):
        headers = {"retry-after": str(_RETRY_SECONDS)}
        return _answer(503, str(error), code="engine_unavailable", headers=headers)
    return _answer(500 if isinstance(error, EngineError) else 503, str(error))


async def _of_database(request: Request, error: Exception) -> JSONResponse:
    _LOG.error("%s %s: the database: %s", request.method, request.url.path, error)
    return _answer(503, "the server's database does not answer; its log has the reason", code="storage")


async def _of_anything(request: Request, error: Exception) -> JSONResponse:
    _LOG.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return _answer(500, "the server failed at this request; its log has the reason")
