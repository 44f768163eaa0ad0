"""Sampling for a request: several sequences side by side, as tokens, as text and as server-sent events."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, ClassVar, TypeAlias, TypeVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import Request

from etude.core.call import Sampling
from etude.core.errors import EngineError, EtudeError
from etude.core.keys import fold
from etude.inference.engine import Sampled, SampledToken, TokenEngine, TokenRequest
from etude.server.engines import EnginePool, require_room
from etude.server.errors import ApiError
from etude.server.metrics import Metrics
from etude.wire.chat import TokenLogprob, named_by_id
from etude.wire.dialect import ChatBody, error_object, server_sent, usage_object
from etude.wire.sampling import change_sampling

_REPLACEMENT = "\ufffd"
_KEY_BITS = 63

News: TypeAlias = tuple[int, SampledToken | Sampled]
"""The index of a sequence, and a token of it, or all of it at its end."""

T = TypeVar("T")


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
        certain = len(self._held) - self._may_be_stop()
        text, self._held = self._held[:certain], self._held[certain:]
        self._sent += len(text)
        return text

    def rest(self, text: str) -> str:
        """The part of the final text that was not given out yet."""
        return text[self._sent :]

    def _may_be_stop(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        lengths = [
            size for stop in self._stops for size in range(1, len(stop)) if self._held.endswith(stop[:size])
        ]
        return max(lengths, default=0)


class SampleStream:
    """The sequences of a request, token by token, in the order in which they come.

    What `held` holds (the engine) is held until sampling has ended, whether anybody listens or not.
    """

    def __init__(self, engine: TokenEngine, requests: Sequence[TokenRequest], held: AsyncExitStack) -> None:
        self._news: asyncio.Queue[News | EngineError | None] = asyncio.Queue()
        self.sampled = 0
        """Tokens that were given out."""
        self._task = asyncio.create_task(self._sample_all(engine, requests, held))

    async def __aiter__(self) -> AsyncIterator[News]:
        """Raises EngineError when a sequence fails."""
        try:
            while (news := await self._news.get()) is not None:
                if isinstance(news, EngineError):
                    raise news
                self.sampled += isinstance(news[1], SampledToken)
                yield news
        finally:
            self._task.cancel()

    async def _sample_all(
        self, engine: TokenEngine, requests: Sequence[TokenRequest], held: AsyncExitStack
    ) -> None:
        async def sample(index: int, request: TokenRequest) -> None:
            sampled = await engine.sample(request, lambda token: self._news.put_nowait((index, token)))
            self._news.put_nowait((index, sampled))

        async with held:
            try:
                async with asyncio.TaskGroup() as group:
                    for index, request in enumerate(requests):
                        group.create_task(sample(index, request))
            except* EngineError as errors:
                self._news.put_nowait(EngineError(str(errors.exceptions[0])))
            self._news.put_nowait(None)


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


class Answering(ABC):
    """A request taken apart: a sequence for each prompt and repetition, and the objects of the answer."""

    prefix: ClassVar[str]
    """How the ids of answers begin."""
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    """The names of the answer's object, and of a piece of it in a stream."""

    def __init__(self, engine: TokenEngine, asked: ChatBody, prompts: Sequence[tuple[int, ...]]) -> None:
        """Raises ApiError for a prompt that cannot be."""
        for prompt in prompts:
            require_room(engine.speech, prompt)
        self.engine = engine
        self.asked = asked
        self.template = engine.speech.template
        self.name = named_by_id if asked.tokens_as_ids else lambda token: self.template.decode([token])
        # Each sequence has a seed of its own; that of the first is as in a request for just one.
        sampling = change_sampling(Sampling(), {**asked.sampling, "seed": None})
        start = asked.sampling.get("seed", secrets.randbits(_KEY_BITS))
        keys = [fold(start, "choice", index) if index else start for index in range(asked.n)]
        self.requests = [
            TokenRequest(prompt, sampling, key=key, top=asked.top_logprobs)
            for prompt in prompts
            for key in keys
        ]
        self.prompt_ids: dict[str, Any] = {}
        """The prompt's ids, for answers that have them beside their choices."""
        self._prompt_tokens = sum(map(len, prompts))
        id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": id, "created": int(time.time()), "model": asked.model}

    @abstractmethod
    def choice_of(self, index: int, sampled: Sampled) -> dict[str, Any]:
        """The choice that a whole sequence is."""

    @abstractmethod
    def chunks(self, stream: SampleStream) -> AsyncIterator[dict[str, Any]]:
        """The pieces of all choices, each made by `chunk`."""

    def text_stream(self) -> TextStream:
        """A stream of the text of one of the sequences."""
        stops = self.requests[0].sampling.stop
        return TextStream(self.template.decode, self.engine.speech.stop_ids, stops)

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A piece of the answer with a piece of one choice."""
        no_usage = {"usage": None} if self.asked.include_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **no_usage}

    async def response(self, request: Request, metrics: Metrics) -> Response:
        """Sample all sequences, and answer. A client that hangs up ends that."""
        answers = await unless_gone(request, self._sample_all)
        sampled = sum(len(answer.ids) for answer in answers)
        metrics.count_tokens(self._prompt_tokens, sampled)
        choices = [self.choice_of(index, answer) for index, answer in enumerate(answers)]
        usage = usage_object(self._prompt_tokens, sampled)
        answer = {**self._head, "object": self.kind, "choices": choices, "usage": usage}
        return JSONResponse(answer | self.prompt_ids)

    async def _sample_all(self) -> list[Sampled]:
        """All sequences, in order. When one fails or the caller is cancelled, all are given up."""
        tasks = [asyncio.ensure_future(self.engine.sample(request)) for request in self.requests]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def events(self, stream: SampleStream, metrics: Metrics) -> AsyncIterator[bytes]:
        """The pieces as events, the usage at the end where it was asked for, and `[DONE]`.

        The status is sent before the first token, so a failure after that is an event with an error object.
        """
        try:
            async for chunk in self.chunks(stream):
                yield server_sent(chunk)
        except EtudeError as error:
            yield server_sent(error_object(500, str(error)))
            return
        metrics.count_tokens(self._prompt_tokens, stream.sampled)
        if self.asked.include_usage:
            usage = usage_object(self._prompt_tokens, stream.sampled)
            yield server_sent({**self._head, "object": self.chunk_kind, "choices": [], "usage": usage})
        yield server_sent("[DONE]")


async def answered(
    pool: EnginePool,
    metrics: Metrics,
    request: Request,
    asked: ChatBody,
    sequences: int,
    taken_apart: Callable[[TokenEngine], Answering],
) -> Response:
    """Answer a request for so many sequences, in a stream where it asks for one."""
    async with AsyncExitStack() as held:
        engine = await held.enter_async_context(pool.using(asked.model, sequences))
        answering = taken_apart(engine)
        if not asked.stream:
            return await answering.response(request, metrics)
        stream = SampleStream(engine, answering.requests, held.pop_all())
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        events = answering.events(stream, metrics)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def tokens_of(sampled: Sampled) -> list[TokenLogprob]:
    """The sampled tokens, each with its logprob and the alternatives to it."""
    tops = sampled.top or ((),) * len(sampled.ids)
    return list(zip(sampled.ids, sampled.logprobs, tops, strict=True))
