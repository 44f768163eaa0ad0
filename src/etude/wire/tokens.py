"""Requests about tokens and models, without sampling: tokenize, detokenize, count tokens, list models."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Literal, Protocol

from pydantic import BaseModel, Field, model_validator

from etude.core.call import ChatRequest
from etude.core.errors import RequestError
from etude.core.message import Message, Tool
from etude.core.threads import call_off_loop
from etude.wire.bodies import TokenIds, check_conversation
from etude.wire.dialect import AnswerMemory
from etude.wire.messages import MessagesDialect
from etude.wire.sampling import Flag, validated

TOKEN_PATHS = ("/tokenize", "/detokenize", "/messages/count_tokens")


class Readers(Protocol):
    """The models behind a gateway, and their tokenizers and templates."""

    def models(self) -> list[dict[str, Any]]:
        """Return OpenAI's `model` object of each model."""

    def reader(self, model: str) -> AbstractAsyncContextManager[Any]:
        """Open the `TextCodec` of a model; "" names the default model. Raises EtudeError."""


class TokenizeBody(BaseModel, extra="forbid"):
    """The body of vLLM's `POST /tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Literal[True] = True
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None

    @model_validator(mode="after")
    def _is_a_prompt_or_messages(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either a prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ValueError("the chat template writes the special tokens; leave add_special_tokens out")
        check_conversation(self.messages or (), self.tools)
        return self


class DetokenizeBody(BaseModel, extra="forbid"):
    """The body of vLLM's `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds


async def token_reply(path: str, body: Any, size: int, readers: Readers) -> dict[str, Any]:
    """Return the reply to a request of `size` bytes to one of `TOKEN_PATHS`. Raises EtudeError."""
    if path == "/detokenize":
        detokenize = validated(DetokenizeBody, body)
        async with readers.reader(detokenize.model or "") as speech:
            if wrong := [token for token in detokenize.tokens if token >= speech.vocabulary]:
                message = f"token id {wrong[0]} is not in the vocabulary of {speech.vocabulary} tokens"
                raise RequestError(message, param="tokens")
            tokens = detokenize.tokens
            return {"prompt": await call_off_loop(len(tokens), speech.template.decode, tokens)}
    if path == "/messages/count_tokens":
        asked = MessagesDialect(AnswerMemory()).parse(body)
        request = ChatRequest(asked.messages, asked.tools, template_options=asked.template_options)
        async with readers.reader(asked.model) as speech:
            prompt = await call_off_loop(size, speech.template.prompt, request)
            return {"input_tokens": len(prompt.ids)}
    tokenize = validated(TokenizeBody, body)
    async with readers.reader(tokenize.model or "") as speech:
        return await call_off_loop(size, _tokenize, tokenize, speech)


def _tokenize(asked: TokenizeBody, speech: Any) -> dict[str, Any]:
    """Return the reply to `POST /tokenize`, with a model's `TextCodec`."""
    if asked.messages is not None:
        options, tools = asked.chat_template_kwargs or {}, tuple(asked.tools or ())
        request = ChatRequest(tuple(asked.messages), tools, template_options=options)
        ids = list(speech.template.prompt(request).ids)
    else:
        special = asked.add_special_tokens is not False
        ids = list(speech.tokenizer(asked.prompt, add_special_tokens=special)["input_ids"])
    texts = speech.tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None
    return {"count": len(ids), "max_model_len": speech.max_context, "tokens": ids, "token_strs": texts}


def models_reply(path: str, readers: Readers) -> dict[str, Any] | None:
    """Return the reply to `GET /models` or `GET /models/NAME`, or None if there is no such model."""
    models, name = readers.models(), path.removeprefix("/models").removeprefix("/")
    if not name:
        return {"object": "list", "data": models, "has_more": False}
    return next((model for model in models if model["id"] == name), None)


OWNER = "etude"
"""The owner of every model."""


def model_object(name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's `model` object."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": OWNER}
