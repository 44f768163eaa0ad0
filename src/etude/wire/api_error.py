"""A request that is refused, with the words in which its client is told."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from etude.wire.gateway import dialect_of


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
        headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def response(self, path: str = "") -> JSONResponse:
        """The answer to a request for a path, in the words of its API."""
        content = dialect_of(path).error(self.status_code, str(self.detail), param=self.param, code=self.code)
        return JSONResponse(content, self.status_code, dict(self.headers or {}))
