"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from etude.core.call import ChatRequest, Completion
from etude.core.errors import EngineError
from etude.core.message import Message, Tool
from etude.inference.engine import Sampled, SampledToken, TokenEngine
from etude.server.engines import EnginePool
from etude.server.errors import ApiError
from etude.server.generation import Answering, SampleStream, answered, tokens_of
from etude.server.metrics import Metrics
from etude.wire.bodies import ChatCompletionBody
from etude.wire.chat import TokenLogprob, chat_choice, chat_delta, logprobs_object, message_deltas
from etude.wire.dialect import ChatBody


def chat_routes(pool: EnginePool, metrics: Metrics, tells_tokens: Callable[[str], bool]) -> APIRouter:
    """The route, over the engines of `pool`; models that `tells_tokens` picks do so without being asked."""
    router = APIRouter(tags=["inference"])

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def create_chat_completion(body: ChatCompletionBody, request: Request) -> Response:
        """OpenAI's chat completions. vLLM's `return_token_ids` adds `prompt_token_ids` and `token_ids`."""
        if tells_tokens(body.model):
            body.logprobs = body.logprobs is not False
            body.return_tokens_as_token_ids = body.return_tokens_as_token_ids is not False
        asked = body.request()
        return await answered(pool, metrics, request, asked, asked.n, lambda engine: _Chat(engine, asked))

    return router


def chat_prompt(engine: TokenEngine, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
    """Token ids of a conversation's prompt. Raises ApiError when the model's template refuses it."""
    try:
        return engine.speech.template.prompt(ChatRequest(tuple(messages), tuple(tools))).ids
    except EngineError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error


class _Chat(Answering):
    """A request with the prompt that all of its answers have in common."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, engine: TokenEngine, asked: ChatBody) -> None:
        self._prompt = chat_prompt(engine, asked.messages, asked.tools)
        super().__init__(engine, asked, [self._prompt])
        if asked.return_token_ids:
            self.prompt_ids = {"prompt_token_ids": self._prompt}
        self._calls = sum(len(message.get("tool_calls") or ()) for message in asked.messages)

    def completion_of(self, sampled: Sampled) -> Completion:
        """The message that was sampled, tool calls and all."""
        message = self.template.parse(
            sampled.text,
            self.asked.tools,
            ids=sampled.ids,
            prompt_ids=self._prompt,
            first_call=self._calls,
        )
        reason = "tool_calls" if message.get("tool_calls") else sampled.finish_reason
        return Completion(message, reason, completion_ids=sampled.ids)

    def choice_of(self, index: int, sampled: Sampled) -> dict[str, Any]:
        completion = self.completion_of(sampled)
        return chat_choice(index, completion, self.asked, self.logprobs_of(tokens_of(sampled)))

    def logprobs_of(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The `logprobs` of a choice, or of a piece of it; None where they are not asked for."""
        return logprobs_object(tokens, self.name) if self.asked.logprobs else None

    async def chunks(self, stream: SampleStream) -> AsyncIterator[dict[str, Any]]:
        choices = [_StreamedChoice(self, index) for index in range(self.asked.n)]
        for choice in choices:
            yield choice.chunk({"role": "assistant", "content": ""}) | self.prompt_ids
        async for index, news in stream:
            choice = choices[index]
            for chunk in choice.add(news) if isinstance(news, SampledToken) else choice.finish(news):
                yield chunk


class _StreamedChoice:
    """One choice of a stream: text as it comes, or, where tools may be called, all at the end."""

    def __init__(self, chat: _Chat, index: int) -> None:
        self._chat = chat
        self._index = index
        self._text = chat.text_stream()
        own_parser = getattr(chat.template.tokenizer, "response_template", None)
        self._at_end = bool(chat.asked.tools or own_parser)
        self._tokens: list[TokenLogprob] = []
        """Those whose text was not given out yet."""

    def add(self, token: SampledToken) -> list[dict[str, Any]]:
        """A chunk, when this token completes a piece of text."""
        self._tokens.append((token.id, token.logprob, token.top))
        text = "" if self._at_end else self._text.add(token.id)
        return [self.chunk({"content": text})] if text else []

    def finish(self, sampled: Sampled) -> list[dict[str, Any]]:
        """The last chunks: what is missing, then the reason of the end."""
        if self._at_end:
            completion = self._chat.completion_of(sampled)
            deltas, reason = [*message_deltas(completion.message)], completion.finish_reason
        else:
            text, reason = self._text.rest(sampled.text), sampled.finish_reason
            deltas = [{"content": text}] if text or self._tokens else []
        return [*map(self.chunk, deltas), self.chunk({}, reason)]

    def chunk(self, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        """A chunk of this choice, with the tokens that its text was made of."""
        tokens, self._tokens = self._tokens, []
        logprobs = self._chat.logprobs_of(tokens) if tokens else None
        token_ids = [token for token, _, _ in tokens] if self._chat.asked.return_token_ids else None
        return self._chat.chunk(
            chat_delta(self._index, delta, finish_reason, logprobs=logprobs, token_ids=token_ids)
        )
