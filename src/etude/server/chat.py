"""`POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from etude.core.call import ChatRequest
from etude.core.errors import EngineError
from etude.core.message import Message
from etude.inference.engine import Sampled, SampledToken, TokenEngine
from etude.server.bodies import ChatBody
from etude.server.engines import EnginePool
from etude.server.errors import ApiError
from etude.server.generation import Answering, SampleStream, answered, chat_logprobs, tokens_of
from etude.server.metrics import Metrics


def chat_routes(pool: EnginePool, metrics: Metrics, tells_tokens: Callable[[str], bool]) -> APIRouter:
    """The route, over the engines of `pool`; models that `tells_tokens` picks do so without being asked."""
    router = APIRouter(tags=["inference"])

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def create_chat_completion(body: ChatBody, request: Request) -> Response:
        """OpenAI's chat completions. vLLM's `return_token_ids` adds `prompt_token_ids` and `token_ids`."""
        body = body.with_tokens() if tells_tokens(body.model) else body
        return await answered(pool, metrics, request, body, body.count, lambda engine: _Chat(engine, body))

    return router


def chat_prompt(engine: TokenEngine, messages: list[Message], tools: Sequence[Any]) -> tuple[int, ...]:
    """Token ids of a conversation's prompt. Raises ApiError when the model's template refuses it."""
    try:
        return engine.speech.template.prompt(ChatRequest(tuple(messages), tuple(tools))).ids
    except EngineError as error:
        raise ApiError(400, str(error), param="messages", code="invalid_value") from error


class _Chat(Answering):
    """A request with the prompt that all of its answers have in common."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, engine: TokenEngine, body: ChatBody) -> None:
        self.body = body
        self.template = engine.speech.template
        self.tools = () if body.tool_choice == "none" else tuple(body.tools or ())
        self._prompt = chat_prompt(engine, body.messages, self.tools)
        super().__init__(engine, body, [self._prompt], body.wanted, body.top_logprobs or 0)

    def completion(self, answers: Sequence[Sampled]) -> dict[str, Any]:
        return super().completion(answers) | self._prompt_ids

    def choice_of(self, index: int, sampled: Sampled) -> dict[str, Any]:
        message = self.message_of(sampled)
        choice = {
            "index": index,
            "message": {"content": None, "refusal": None} | message,
            "finish_reason": _finish_reason(sampled, message),
            "logprobs": chat_logprobs(tokens_of(sampled), self.name) if self.body.logprobs else None,
        }
        return choice | ({"token_ids": sampled.ids} if self.body.return_token_ids else {})

    def message_of(self, sampled: Sampled) -> Message:
        """The message that was sampled, tool calls and all."""
        earlier = sum(len(message.get("tool_calls") or ()) for message in self.body.messages)
        return self.template.parse(sampled.text, self.tools, prompt_ids=self._prompt, first_call=earlier)

    async def chunks(self, stream: SampleStream) -> AsyncIterator[dict[str, Any]]:
        choices = [_StreamedChoice(self, index) for index in range(self.body.count)]
        for choice in choices:
            yield choice.chunk({"role": "assistant", "content": ""}) | self._prompt_ids
        async for news in stream:
            choice = choices[news.index]
            if news.token is not None and (chunk := choice.add(news.token)) is not None:
                yield chunk
            for chunk in () if news.end is None else choice.finish(news.end):
                yield chunk

    @property
    def _prompt_ids(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt} if self.body.return_token_ids else {}


def _finish_reason(sampled: Sampled, message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else sampled.finish_reason


class _StreamedChoice:
    """One choice of a stream: text as it comes, or, where tools may be called, all at the end."""

    def __init__(self, chat: _Chat, index: int) -> None:
        self._chat = chat
        self._index = index
        self._text = chat.text_stream()
        own_parser = getattr(chat.template.tokenizer, "response_template", None)
        self._at_end = bool(chat.tools or own_parser)
        self._tokens: list[SampledToken] = []

    def add(self, token: SampledToken) -> dict[str, Any] | None:
        """A chunk, when this token completes a piece of text."""
        self._tokens.append(token)
        text = "" if self._at_end else self._text.add(token.id)
        return self.chunk({"content": text}, self._take_tokens()) if text else None

    def finish(self, sampled: Sampled) -> list[dict[str, Any]]:
        """The last chunks: what is missing, then the reason of the end."""
        chunks = []
        if self._at_end:
            message = self._chat.message_of(sampled)
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
        body, name = self._chat.body, self._chat.name
        choice: dict[str, Any] = {"index": self._index, "delta": delta, "finish_reason": finish_reason}
        choice["logprobs"] = chat_logprobs(tokens, name) if body.logprobs and tokens else None
        if body.return_token_ids:
            choice["token_ids"] = [token.id for token in tokens]
        return self._chat.chunk(choice)

    def _take_tokens(self) -> list[SampledToken]:
        taken, self._tokens = self._tokens, []
        return taken
