"""`POST /v1/completions` and `POST /tokenize`: prompts as they stand, without a chat template."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from etude.inference.engine import Sampled, SampledToken, TokenEngine
from etude.server.bodies import CompletionBody, TokenizeBody
from etude.server.chat import chat_prompt
from etude.server.engines import EnginePool
from etude.server.generation import Answering, SampleStream, answered, completion_logprobs, tokens_of
from etude.server.metrics import Metrics

_DEFAULT_TOKENS = 16
"""OpenAI's `max_tokens` where a completion asks for none."""


def completion_routes(pool: EnginePool, metrics: Metrics, base: str) -> APIRouter:
    """The routes, over the engines of `pool`; `base` is the model of requests that name none."""
    router = APIRouter(tags=["inference"])

    @router.post("/v1/completions", summary="Continue a text")
    async def create_completion(body: CompletionBody, request: Request) -> Response:
        """OpenAI's completions: prompts are texts, or token ids."""
        count = len(body.prompts) * body.count
        return await answered(pool, metrics, request, body, count, lambda engine: _Texts(engine, body))

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


class _Texts(Answering):
    """A request whose prompts are texts, or token ids."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, engine: TokenEngine, body: CompletionBody) -> None:
        self.body = body
        prompts = [
            tuple(_encode(engine, prompt, special=True) if isinstance(prompt, str) else prompt)
            for prompt in body.prompts
        ]
        super().__init__(engine, body, prompts, body.max_tokens or _DEFAULT_TOKENS, body.logprobs or 0)

    def choice_of(self, index: int, sampled: Sampled) -> dict[str, Any]:
        return self._choice(index, sampled.text, tokens_of(sampled), sampled.finish_reason, 0)

    async def chunks(self, stream: SampleStream) -> AsyncIterator[dict[str, Any]]:
        texts = [self.text_stream() for _ in self.requests]
        waiting: list[list[SampledToken]] = [[] for _ in self.requests]
        offsets = [0] * len(self.requests)
        async for news in stream:
            index, text, reason = news.index, "", None
            if news.token is not None:
                waiting[index].append(news.token)
                text = texts[index].add(news.token.id)
            if news.end is not None:
                text, reason = texts[index].rest(news.end.text), news.end.finish_reason
            if text or reason:
                yield self.chunk(self._choice(index, text, waiting[index], reason, offsets[index]))
                waiting[index] = []
                offsets[index] += len(text)

    def _choice(
        self, index: int, text: str, tokens: Sequence[SampledToken], finish_reason: str | None, offset: int
    ) -> dict[str, Any]:
        """A choice, or a piece of it whose text begins at `offset`."""
        logprobs = None
        if self.body.logprobs is not None:
            logprobs = completion_logprobs(tokens, self.name, offset)
        choice = {"index": index, "text": text, "finish_reason": finish_reason, "logprobs": logprobs}
        if self.body.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
            choice["prompt_token_ids"] = self.requests[index].prompt_ids
        return choice


def _encode(engine: TokenEngine, text: str, *, special: bool) -> list[int]:
    ids: list[int] = engine.speech.tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids
