"""Sampling for a request: several sequences side by side, as tokens, as text and as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi.responses import StreamingResponse
from starlette.requests import Request

from etude.core.errors import EngineError, EtudeError
from etude.core.keys import fold
from etude.inference.engine import Sampled, SampledToken, TokenEngine, TokenRequest
from etude.server.errors import ApiError, error_object

_LOWEST = -9999.0
"""In place of minus infinity, which JSON does not have."""
_REPLACEMENT = "\ufffd"

Name = Callable[[int], str]
"""A token's text, or `token_id:7` where the request wants that."""


T = TypeVar("T")
_KEY_BITS = 63


def chat_logprobs(tokens: Sequence[SampledToken], name: Name) -> dict[str, Any]:
    """The `logprobs` of a chat completion's choice."""
    content = [
        _entry(token.id, token.logprob, name)
        | {"top_logprobs": [_entry(other, logprob, name) for other, logprob in token.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[SampledToken], name: Name, offset: int) -> dict[str, Any]:
    """The `logprobs` of a completion's choice; `offset` is where its text begins."""
    texts = [name(token.id) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "text_offset": offsets,
        "top_logprobs": [{name(other): _finite(value) for other, value in token.top} for token in tokens],
    }


def namer(decode: Callable[[Sequence[int]], str], *, as_ids: bool) -> Name:
    """How tokens are named."""
    return (lambda token: f"token_id:{token}") if as_ids else (lambda token: decode([token]))


def _entry(token: int, logprob: float, name: Name) -> dict[str, Any]:
    text = name(token)
    # A token that is a part of a character has no text of its own, and so none to give the bytes of.
    return {
        "token": text,
        "logprob": _finite(logprob),
        "bytes": None if _REPLACEMENT in text else list(text.encode()),
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)


class TextStream:
    """Turns the tokens of one sequence into pieces of text that add up to the final text."""

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        stop_ids: frozenset[int],
        stops: Sequence[str],
    ) -> None:
        self._decode = decode
        self._stop_ids = stop_ids
        self._stops = stops
        self._ids: list[int] = []
        self._known = self._read = 0
        """Tokens before `known` are out; those up to `read` are decoded again, as context of the rest."""
        self._held = ""
        self._sent = 0
        self._over = False

    def add(self, token: int) -> str:
        """The text that is certain now that this token was sampled; often empty."""
        if self._over or token in self._stop_ids:
            return ""
        self._ids.append(token)
        before = self._decode(self._ids[self._known : self._read])
        now = self._decode(self._ids[self._known :])
        if now.endswith(_REPLACEMENT) or len(now) <= len(before):
            return ""
        self._known, self._read = self._read, len(self._ids)
        self._held += now[len(before) :]
        if any(stop in self._held for stop in self._stops):
            self._over = True
            return ""
        return self._let_go(len(self._held) - self._may_be_stop())

    def rest(self, text: str) -> str:
        """The part of the final text that was not given out yet."""
        return text[self._sent :]

    def _let_go(self, length: int) -> str:
        out, self._held = self._held[:length], self._held[length:]
        self._sent += len(out)
        return out

    def _may_be_stop(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        lengths = [
            size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size])
        ]
        return max(lengths, default=0)


def streamed(chunks: AsyncIterator[dict[str, Any]]) -> StreamingResponse:
    """The response that sends each object as an event, and `[DONE]` at the end.

    The status is sent before the first token, so a failure after that is an event with an error object.
    """

    async def events() -> AsyncIterator[bytes]:
        try:
            async for chunk in chunks:
                yield _event(json.dumps(chunk))
        except EtudeError as error:
            yield _event(json.dumps(error_object(500, str(error))))
            return
        yield _event("[DONE]")

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


def _event(data: str) -> bytes:
    return f"data: {data}\n\n".encode()


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
