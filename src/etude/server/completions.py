"""`POST /v1/completions` and `POST /tokenize`: prompts as they stand, without a chat template."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from etude.inference.engine import Sampled, SampledToken, TokenEngine, TokenRequest
from etude.server.bodies import CompletionBody, TokenizeBody
from etude.server.chat import chat_prompt, tokens_of, usage
from etude.server.engines import EnginePool, require_room
from etude.server.generation import (
    Name,
    SampleStream,
    TextStream,
    completion_logprobs,
    namer,
    requests_of,
    sample_all,
    streamed,
    unless_gone,
)
from etude.server.metrics import Metrics

_DEFAULT_TOKENS = 16
"""OpenAI's `max_tokens` where a completion asks for none."""


def completion_routes(pool: EnginePool, metrics: Metrics, base: str) -> APIRouter:
    """The routes, over the engines of `pool`; `base` is the model of requests that name none."""
    router = APIRouter(tags=["inference"])

    @router.post("/v1/completions", summary="Continue a text")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """OpenAI's completions: prompts are texts, or token ids."""
        async with AsyncExitStack() as held:
            count = len(body.prompts) * body.count
            engine = await held.enter_async_context(pool.using(body.model, count))
            asked = _Asked(engine, body)
            if body.stream:
                stream = SampleStream(engine, asked.requests, held.pop_all())
                return streamed(_chunks(asked, stream, metrics))
            answers = await unless_gone(request, lambda: sample_all(engine, asked.requests))
        metrics.count_tokens(asked.prompt_tokens, sum(len(answer.ids) for answer in answers))
        return JSONResponse(asked.completion(answers))

    @router.post("/tokenize", summary="Tokenise a text or a conversation")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """vLLM's tokenize: the ids that a prompt would have."""
        async with pool.using(body.model or base, 0) as engine:
            template = engine.speech.template
            if body.messages is not None:
                ids = list(chat_prompt(engine, body.messages, body.tools or ()))
            else:
                ids = _encode(engine, body.prompt or "", special=body.add_special_tokens is not False)
            strings = template.tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
            return {
                "count": len(ids),
                "max_model_len": engine.speech.max_context,
                "tokens": ids,
                "token_strs": strings,
            }

    return router


class _Asked:
    """A request taken apart: one sequence for each prompt and repetition."""

    def __init__(self, engine: TokenEngine, body: CompletionBody) -> None:
        self.body = body
        self.id, self.created = f"cmpl-{secrets.token_hex(12)}", int(time.time())
        self.speech = engine.speech
        decode = engine.speech.template.decode
        self.name: Name = namer(decode, as_ids=bool(body.return_tokens_as_token_ids))
        prompts = [
            tuple(_encode(engine, prompt, special=True) if isinstance(prompt, str) else prompt)
            for prompt in body.prompts
        ]
        for prompt in prompts:
            require_room(engine.speech, prompt)
        sampling = body.sampling(body.max_tokens or _DEFAULT_TOKENS)
        wanted = [TokenRequest(prompt, sampling, top=body.logprobs or 0) for prompt in prompts]
        self.requests = [
            repeated for request in wanted for repeated in requests_of(request, body.count, body.seed)
        ]
        self.prompt_tokens = sum(map(len, prompts))

    def head(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.body.model,
        }

    def completion(self, answers: Sequence[Sampled]) -> dict[str, Any]:
        choices = [
            self.choice(index, answer.text, tokens_of(answer), answer.finish_reason)
            for index, answer in enumerate(answers)
        ]
        tokens = usage(self.prompt_tokens, sum(len(answer.ids) for answer in answers))
        return self.head() | {"choices": choices, "usage": tokens}

    def choice(
        self,
        index: int,
        text: str,
        tokens: Sequence[SampledToken],
        finish_reason: str | None,
        offset: int = 0,
    ) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = completion_logprobs(tokens, self.name, offset)
        choice = {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}
        if self.body.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            choice["prompt_token_ids"] = self.requests[index].prompt_ids
        return choice


async def _chunks(asked: _Asked, stream: SampleStream, metrics: Metrics) -> AsyncIterator[dict[str, Any]]:
    """The `text_completion` objects of a stream."""
    speech, stops = asked.speech, asked.body.sampling(None).stop
    texts = [TextStream(speech.template.decode, speech.stop_ids, stops) for _ in asked.requests]
    waiting: list[list[SampledToken]] = [[] for _ in asked.requests]
    offsets, sampled_tokens = [0] * len(asked.requests), 0
    none: dict[str, Any] = {"usage": None} if asked.body.include_usage else {}
    async for news in stream:
        index, text, reason = news.index, "", None
        if news.token is not None:
            sampled_tokens += 1
            waiting[index].append(news.token)
            text = texts[index].add(news.token.id)
        if news.end is not None:
            text, reason = texts[index].rest(news.end.text), news.end.finish_reason
        if text or reason:
            choice = asked.choice(index, text, waiting[index], reason, offsets[index])
            yield asked.head() | {"choices": [choice]} | none
            waiting[index] = []
            offsets[index] += len(text)
    metrics.count_tokens(asked.prompt_tokens, sampled_tokens)
    if asked.body.include_usage:
        yield asked.head() | {"choices": [], "usage": usage(asked.prompt_tokens, sampled_tokens)}


def _encode(engine: TokenEngine, text: str, *, special: bool) -> list[int]:
    ids: list[int] = engine.speech.tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids
