"""`POST /v1/completions` and `POST /tokenize`: prompts as they stand, without a chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.core.message import Message, Tool
from etude.inference.engine import Sampled, SampledToken, TokenEngine
from etude.server.chat import chat_prompt
from etude.server.engines import EnginePool
from etude.server.generation import Answering, SampleStream, answered, tokens_of
from etude.server.metrics import Metrics
from etude.wire.bodies import CompletionBody, check_conversation
from etude.wire.chat import TokenLogprob, finite

_DEFAULT_TOKENS = 16
"""OpenAI's `max_tokens` where a completion asks for none."""


class TokenizeBody(BaseModel):
    """The body of `POST /tokenize`, as vLLM has it: a prompt, or messages."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    add_generation_prompt: Literal[True] = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _is_a_prompt_or_messages(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        check_conversation(self.messages or (), self.tools)
        return self


def completion_routes(pool: EnginePool, metrics: Metrics, base: str) -> APIRouter:
    """The routes, over the engines of `pool`; `base` is the model of requests that name none."""
    router = APIRouter(tags=["inference"])

    @router.post("/v1/completions", summary="Continue a text")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """OpenAI's completions: prompts are texts, or token ids."""
        asked = body.request()
        count = len(body.prompts) * asked.n
        return await answered(pool, metrics, request, asked, count, lambda engine: _Texts(engine, body))

    @router.post("/tokenize", summary="Tokenise a text or a conversation")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """vLLM's tokenize: the ids that a prompt would have."""
        async with pool.using(body.model or base, 0) as engine:
            if body.messages is not None:
                ids = list(chat_prompt(engine, body.messages, body.tools or ()))
            else:
                ids = _encode(engine, body.prompt or "", special=body.add_special_tokens is not False)
            tokenizer = engine.speech.template.tokenizer
            return {
                "count": len(ids),
                "max_model_len": engine.speech.max_context,
                "tokens": ids,
                "token_strs": tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None,
            }

    return router


class _Texts(Answering):
    """A request whose prompts are texts, or token ids."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, engine: TokenEngine, body: CompletionBody) -> None:
        prompts = [
            tuple(_encode(engine, prompt, special=True) if isinstance(prompt, str) else prompt)
            for prompt in body.prompts
        ]
        asked = body.request()
        sampling = {"max_tokens": _DEFAULT_TOKENS, **asked.sampling}
        super().__init__(engine, replace(asked, sampling=sampling), prompts)

    def choice_of(self, index: int, sampled: Sampled) -> dict[str, Any]:
        return self._choice(index, sampled.text, tokens_of(sampled), sampled.finish_reason, 0)

    async def chunks(self, stream: SampleStream) -> AsyncIterator[dict[str, Any]]:
        texts = [self.text_stream() for _ in self.requests]
        waiting: list[list[TokenLogprob]] = [[] for _ in self.requests]
        offsets = [0] * len(self.requests)
        async for index, news in stream:
            if isinstance(news, SampledToken):
                waiting[index].append((news.id, news.logprob, news.top))
                text, reason = texts[index].add(news.id), None
            else:
                text, reason = texts[index].rest(news.text), news.finish_reason
            if text or reason:
                yield self.chunk(self._choice(index, text, waiting[index], reason, offsets[index]))
                waiting[index] = []
                offsets[index] += len(text)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenLogprob], finish_reason: str | None, offset: int
    ) -> dict[str, Any]:
        """A choice, or a piece of it whose text begins at `offset`."""
        logprobs = self._logprobs(tokens, offset) if self.asked.logprobs else None
        choice = {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}
        if self.asked.return_token_ids:
            choice["token_ids"] = [token for token, _, _ in tokens]
            choice["prompt_token_ids"] = self.requests[index].prompt_ids
        return choice

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        texts = [self.name(token) for token, _, _ in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [finite(logprob) for _, logprob, _ in tokens],
            "text_offset": [*accumulate(map(len, texts), initial=offset)][:-1],
            "top_logprobs": [
                {self.name(other): finite(logprob) for other, logprob in top} for _, _, top in tokens
            ],
        }


def _encode(engine: TokenEngine, text: str, *, special: bool) -> list[int]:
    ids: list[int] = engine.speech.tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids
