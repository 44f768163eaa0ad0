"""Sampling for a request: several sequences side by side, as tokens, as text and as server-sent events."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.requests import Request

from etude.core.errors import EngineError, EtudeError
from etude.core.keys import fold
from etude.inference.engine import Sampled, SampledToken, TokenEngine, TokenRequest
from etude.server.bodies import InferenceBody
from etude.server.engines import EnginePool, require_room
from etude.server.errors import ApiError, error_object
from etude.server.metrics import Metrics

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
        self.sampled = 0
        """Tokens that were given out."""
        self._task = asyncio.create_task(self._sample(engine, requests, held))

    async def __aiter__(self) -> AsyncIterator[News]:
        """Raises EngineError when a sequence fails."""
        try:
            while (news := await self._news.get()) is not None:
                if isinstance(news, EngineError):
                    raise news
                self.sampled += news.token is not None
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


class Answering(ABC):
    """A request taken apart: a sequence for each prompt and repetition, and the objects of the answer."""

    prefix: ClassVar[str]
    """How the ids of answers begin."""
    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    """The names of the answer's object, and of a piece of it in a stream."""

    def __init__(
        self,
        engine: TokenEngine,
        body: InferenceBody,
        prompts: Sequence[tuple[int, ...]],
        max_tokens: int | None,
        top: int,
    ) -> None:
        """`top` is the number of alternatives that each token comes with. Raises ApiError for a prompt."""
        for prompt in prompts:
            require_room(engine.speech, prompt)
        self.speech = engine.speech
        self.name = namer(self.speech.template.decode, as_ids=bool(body.return_tokens_as_token_ids))
        sampling = body.sampling(max_tokens)
        self.requests = [
            replace(TokenRequest(prompt, sampling, top=top), key=key)
            for prompt in prompts
            for key in _keys(body.count, body.seed)
        ]
        self._stops = sampling.stop
        self._prompt_tokens = sum(map(len, prompts))
        self._tells_usage = body.include_usage
        id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._head = {"id": id, "created": int(time.time()), "model": body.model}

    @abstractmethod
    def choice_of(self, index: int, sampled: Sampled) -> dict[str, Any]:
        """The choice that a whole sequence is."""

    @abstractmethod
    def chunks(self, stream: SampleStream) -> AsyncIterator[dict[str, Any]]:
        """The pieces of all choices, each made by `chunk`."""

    def text_stream(self) -> TextStream:
        """A stream of the text of one of the sequences."""
        return TextStream(self.speech.template.decode, self.speech.stop_ids, self._stops)

    def chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        """A piece of the answer with a piece of one choice."""
        no_usage = {"usage": None} if self._tells_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": [choice], **no_usage}

    def completion(self, answers: Sequence[Sampled]) -> dict[str, Any]:
        """The answer, where it is not streamed."""
        choices = [self.choice_of(index, answer) for index, answer in enumerate(answers)]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage(_tokens(answers))}

    async def all_chunks(self, stream: SampleStream, metrics: Metrics) -> AsyncIterator[dict[str, Any]]:
        """All pieces of a stream, the usage at its end among them where it was asked for."""
        async for chunk in self.chunks(stream):
            yield chunk
        metrics.count_tokens(self._prompt_tokens, stream.sampled)
        if self._tells_usage:
            usage = self._usage(stream.sampled)
            yield {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    async def answer(self, request: Request, engine: TokenEngine, metrics: Metrics) -> Response:
        """Sample all sequences, and answer. A client that hangs up ends that."""
        answers = await unless_gone(request, lambda: sample_all(engine, self.requests))
        metrics.count_tokens(self._prompt_tokens, _tokens(answers))
        return JSONResponse(self.completion(answers))

    def _usage(self, sampled: int) -> dict[str, int]:
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


async def answered(
    pool: EnginePool,
    metrics: Metrics,
    request: Request,
    body: InferenceBody,
    sequences: int,
    taken_apart: Callable[[TokenEngine], Answering],
) -> Response:
    """Answer a request for so many sequences, in a stream where it asks for one."""
    async with AsyncExitStack() as held:
        engine = await held.enter_async_context(pool.using(body.model, sequences))
        answering = taken_apart(engine)
        if not body.stream:
            return await answering.answer(request, engine, metrics)
        stream = SampleStream(engine, answering.requests, held.pop_all())
        return streamed(answering.all_chunks(stream, metrics))


def tokens_of(sampled: Sampled) -> list[SampledToken]:
    """The sampled tokens, each with its logprob and the alternatives to it."""
    tops = sampled.top or ((),) * len(sampled.ids)
    return [
        SampledToken(token, logprob, top)
        for token, logprob, top in zip(sampled.ids, sampled.logprobs, tops, strict=True)
    ]


def _keys(count: int, seed: int | None) -> list[int]:
    """The randomness of each repetition; that of the first is as in a request for just one."""
    start = secrets.randbits(_KEY_BITS) if seed is None else seed
    return [fold(start, "choice", index) if index else start for index in range(count)]


def _tokens(answers: Sequence[Sampled]) -> int:
    return sum(len(answer.ids) for answer in answers)
