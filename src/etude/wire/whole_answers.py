"""An HTTP client that gives whole answers in time, however slowly they come, or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx

SLOWEST_BYTES = 32 * 1024
"""A request has a second more for each so many bytes of its body."""


class MalformedAnswer(httpx.RequestError):
    """A good answer by its status, and none to what was asked."""


class WholeAnswers(httpx.AsyncClient):
    """Limits the whole of a request with its answer, where httpx limits the time between two pieces.

    A request may take `seconds`, and one more for each `SLOWEST_BYTES` of its body; then httpx.ReadTimeout
    is raised. `problem_of` says what is wrong with a good answer, which then raises MalformedAnswer.
    """

    def __init__(
        self, *, seconds: float, problem_of: Callable[[httpx.Response], str | None], **options: Any
    ) -> None:
        super().__init__(timeout=seconds, **options)
        self._seconds = seconds
        self._problem_of = problem_of

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """As httpx.AsyncClient.send; answers that are streamed are not looked at."""
        length = int(request.headers.get("content-length", 0))
        try:
            async with asyncio.timeout(self._seconds + length / SLOWEST_BYTES):
                response = await super().send(request, **options)
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"no whole answer in {self._seconds:g} s", request=request) from error
        if response.is_success and not options.get("stream"):
            problem = self._problem_of(response)
            if problem is not None:
                raise MalformedAnswer(problem, request=request)
        return response
