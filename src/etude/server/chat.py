"""`POST /v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from etude.core.call import ChatRequest
from etude.core.errors import EngineError
from etude.core.message import Message
from etude.inference.engine import Sampled, SampledToken, TokenEngine, TokenRequest
from etude.models.template import ChatTemplate
from etude.server.bodies import ChatBody
from etude.server.engines import EnginePool, require_room
from etude.server.errors import ApiError
from etude.server.generation import (
    Name,
    SampleStream,
    TextStream,
    chat_logprobs,
    namer,
    requests_of,
    sample_all,
    streamed,
    unless_gone,
)
from etude.server.metrics import Metrics


@dataclass(slots=True)
class _Asked:
    """A request with its prompt, and what all of its answers have in common."""

    body: ChatBody
    template: ChatTemplate
    prompt_ids: tuple[int, ...]
    name: Name
    stop_ids: frozenset[int]
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:
        return () if self.body.tool_choice == "none" else tuple(self.body.tools or ())

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model}


def chat_routes(pool: EnginePool, metrics: Metrics, tells_tokens: Callable[[str], bool]) -> APIRouter:
    """The route, over the engines of `pool`; models that `tells_tokens` picks do so without being asked."""
    router = APIRouter(tags=["inference"])

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """OpenAI's chat completions. vLLM's `return_token_ids` adds `prompt_token_ids` and `token_ids`."""
        body = body.with_tokens() if tells_tokens(body.model) else body
        async with AsyncExitStack() as held:
            engine = await held.enter_async_context(pool.using(body.model, body.count))
            asked = _ask(engine, body)
            wanted = TokenRequest(asked.prompt_ids, body.sampling(body.wanted), top=body.top_logprobs or 0)
            requests = requests_of(wanted, body.count, body.seed)
            if body.stream:
                stream = SampleStream(engine, requests, held.pop_all())
                return streamed(_chunks(asked, stream, metrics))
            answers = await unless_gone(request, lambda: sample_all(engine, requests))
        metrics.count_tokens(len(asked.prompt_ids), sum(len(answer.ids) for answer in answers))
        return JSONResponse(_completion(asked, answers))

    return router


def chat_prompt(engine: TokenEngine, messages: list[Message], tools: Sequence[Any]) -> tuple[int, ...]:
    """Token ids of a conversation's prompt. Raises ApiError when the model's template refuses it."""
    try:
        return engine.speech.template.prompt(ChatRequest(tuple(messages), tuple(tools))).ids
    except EngineError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error


def _ask(engine: TokenEngine, body: ChatBody) -> _Asked:
    speech = engine.speech
    name = namer(speech.template.decode, as_ids=bool(body.return_tokens_as_token_ids))
    asked = _Asked(body, speech.template, (), name, speech.stop_ids)
    asked.prompt_ids = chat_prompt(engine, body.messages, asked.tools)
    require_room(engine.speech, asked.prompt_ids)
    return asked


def _completion(asked: _Asked, answers: Sequence[Sampled]) -> dict[str, Any]:
    body = asked.body
    wire = asked.head("chat.completion")
    wire["choices"] = [_choice(asked, index, answer) for index, answer in enumerate(answers)]
    wire["usage"] = usage(len(asked.prompt_ids), sum(len(answer.ids) for answer in answers))
    if body.return_token_ids:
        wire["prompt_token_ids"] = asked.prompt_ids
    return wire


def _choice(asked: _Asked, index: int, sampled: Sampled) -> dict[str, Any]:
    message = _message(asked, sampled)
    logprobs = chat_logprobs(tokens_of(sampled), asked.name) if asked.body.logprobs else None
    choice = {
        "index": index,
        "message": {"content": None, "refusal": None} | message,
        "finish_reason": _finish_reason(sampled, message),
        "logprobs": logprobs,
    }
    return choice | ({"token_ids": sampled.ids} if asked.body.return_token_ids else {})


def _message(asked: _Asked, sampled: Sampled) -> Message:
    earlier = sum(len(message.get("tool_calls") or ()) for message in asked.body.messages)
    return asked.template.parse(sampled.text, asked.tools, prompt_ids=asked.prompt_ids, first_call=earlier)


def _finish_reason(sampled: Sampled, message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else sampled.finish_reason


async def _chunks(asked: _Asked, stream: SampleStream, metrics: Metrics) -> AsyncIterator[dict[str, Any]]:
    """The `chat.completion.chunk` objects."""
    body, sampled_tokens = asked.body, 0
    choices = [_StreamedChoice(asked, index) for index in range(body.count)]
    prompt = {"prompt_token_ids": asked.prompt_ids} if body.return_token_ids else {}
    for choice in choices:
        yield choice.chunk({"role": "assistant", "content": ""}) | prompt
    async for news in stream:
        choice = choices[news.index]
        if news.token is not None:
            sampled_tokens += 1
            delta = choice.add(news.token)
            if delta is not None:
                yield delta
        if news.end is not None:
            for chunk in choice.finish(news.end):
                yield chunk
    metrics.count_tokens(len(asked.prompt_ids), sampled_tokens)
    if body.include_usage:
        tokens = usage(len(asked.prompt_ids), sampled_tokens)
        yield asked.head("chat.completion.chunk") | {"choices": [], "usage": tokens}


class _StreamedChoice:
    """One choice of a stream: text as it comes, or, where tools may be called, all at the end."""

    def __init__(self, asked: _Asked, index: int) -> None:
        self._asked = asked
        self._index = index
        stops = asked.body.sampling(None).stop
        self._text = TextStream(asked.template.decode, asked.stop_ids, stops)
        own_parser = getattr(asked.template.tokenizer, "response_template", None)
        self._at_end = bool(asked.tools or own_parser)
        self._tokens: list[SampledToken] = []

    def add(self, token: SampledToken) -> dict[str, Any] | None:
        """A chunk, when this token completes a piece of text."""
        self._tokens.append(token)
        text = "" if self._at_end else self._text.add(token.id)
        return self.chunk({"content": text}, self._take_tokens()) if text else None

    def finish(self, sampled: Sampled) -> list[dict[str, Any]]:
        """The last chunks: what is missing, then the reason of the end."""
        asked, chunks = self._asked, []
        if self._at_end:
            message = _message(asked, sampled)
            calls = message.get("tool_calls") or ()
            rest = {name: value for name, value in message.items() if name not in ("role", "tool_calls")}
            chunks.append(self.chunk(rest, self._take_tokens()))
            chunks += [
                self.chunk({"tool_calls": [{"index": index, **call}]}) for index, call in enumerate(calls)
            ]
            reason = _finish_reason(sampled, message)
        else:
            rest_text, reason = self._text.rest(sampled.text), sampled.finish_reason
            if rest_text or self._tokens:
                chunks.append(self.chunk({"content": rest_text}, self._take_tokens()))
        return [*chunks, self.chunk({}, finish_reason=reason)]

    def chunk(
        self,
        delta: dict[str, Any],
        tokens: Sequence[SampledToken] = (),
        *,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        """A chunk of this choice; `tokens` are those that its text was made of."""
        body, asked = self._asked.body, self._asked
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": finish_reason}
        choice["logprobs"] = chat_logprobs(tokens, asked.name) if body.logprobs and tokens else None
        if body.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        no_usage = {"usage": None} if body.include_usage else {}
        return asked.head("chat.completion.chunk") | {"choices": [choice]} | no_usage

    def _take_tokens(self) -> list[SampledToken]:
        taken, self._tokens = self._tokens, []
        return taken


def tokens_of(sampled: Sampled) -> list[SampledToken]:
    """The sampled tokens, each with its logprob and the alternatives to it."""
    tops = sampled.top or ((),) * len(sampled.ids)
    return [
        SampledToken(token, logprob, top)
        for token, logprob, top in zip(sampled.ids, sampled.logprobs, tops, strict=True)
    ]


def usage(prompt: int, completion: int) -> dict[str, int]:
    """The `usage` object."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
