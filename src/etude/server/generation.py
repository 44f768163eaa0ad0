"""Several sequences of one request, sampled side by side."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request

from etude.core.errors import EngineError
from etude.core.keys import fold
from etude.inference.engine import Sampled, SampledToken, TokenEngine, TokenRequest
from etude.server.errors import ApiError

T = TypeVar("T")

_KEY_BITS = 63


@dataclass(frozen=True, slots=True)
class News:
    """Something about one of the sequences: a token, or its end."""

    index: int
    token: SampledToken | None = None
    end: Sampled | None = None


def requests_of(request: TokenRequest, count: int, seed: int | None) -> list[TokenRequest]:
    """`count` requests with randomness of their own; the first is that of a request for just one."""
    start = secrets.randbits(_KEY_BITS) if seed is None else seed
    return [replace(request, key=fold(start, "choice", index) if index else start) for index in range(count)]


async def sample_all(engine: TokenEngine, requests: Sequence[TokenRequest]) -> list[Sampled]:
    """All sequences, in order. When one fails or the caller is cancelled, all are given up."""
    tasks = [asyncio.ensure_future(engine.sample(request)) for request in requests]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


class SampleStream:
    """The sequences of a request, token by token, in the order in which they come.

    What `held` holds (the engine) is held until sampling has ended, whether anybody listens or not.
    """

    def __init__(self, engine: TokenEngine, requests: Sequence[TokenRequest], held: AsyncExitStack) -> None:
        self._news: asyncio.Queue[News | EngineError | None] = asyncio.Queue()
        self._task = asyncio.create_task(self._sample(engine, requests, held))

    async def __aiter__(self) -> AsyncIterator[News]:
        """Raises EngineError when a sequence fails."""
        try:
            while (news := await self._news.get()) is not None:
                if isinstance(news, EngineError):
                    raise news
                yield news
        finally:
            self._task.cancel()

    async def _sample(
        self, engine: TokenEngine, requests: Sequence[TokenRequest], held: AsyncExitStack
    ) -> None:
        async with held:
            try:
                async with asyncio.TaskGroup() as group:
                    for index, request in enumerate(requests):
                        group.create_task(self._sample_one(engine, index, request))
            except* EngineError as errors:
                first = errors.exceptions[0]
                self._news.put_nowait(first if isinstance(first, EngineError) else EngineError(str(first)))
            self._news.put_nowait(None)

    async def _sample_one(self, engine: TokenEngine, index: int, request: TokenRequest) -> None:
        sampled = await engine.sample(request, lambda token: self._news.put_nowait(News(index, token=token)))
        self._news.put_nowait(News(index, end=sampled))


async def unless_gone(request: Request, work: Callable[[], Awaitable[T]]) -> T:
    """The result of `work`, which is cancelled when the client hangs up.

    Raises ApiError then, for the log: there is nobody to answer.
    """
    working = asyncio.ensure_future(work())
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client hung up")
        return await working
    finally:
        working.cancel()
        leaving.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
