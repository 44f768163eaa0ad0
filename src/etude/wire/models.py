"""Requests that sample nothing: the list of models, and the number of a prompt's tokens."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from etude.core.call import ChatRequest
from etude.core.threads import call_off_loop
from etude.wire.dialect import AnswerMemory
from etude.wire.messages import MessagesDialect

COUNT_TOKENS = "/messages/count_tokens"

OWNER = "etude"
"""The owner of every model."""


class Readers(Protocol):
    """The models behind a gateway, and their tokenizers and templates."""

    def models(self) -> list[dict[str, Any]]:
        """Return OpenAI's `model` object of each model."""

    def reader(self, model: str) -> AbstractAsyncContextManager[Any]:
        """Open the `TextCodec` of a model; "" names the default model. Raises EtudeError."""


async def count_tokens(body: Any, size: int, readers: Readers) -> dict[str, int]:
    """Return the reply to a request of `size` bytes to `COUNT_TOKENS`. Raises EtudeError."""
    asked = MessagesDialect(AnswerMemory()).parse(body)
    request = ChatRequest(asked.messages, asked.tools, template_options=asked.template_options)
    async with readers.reader(asked.model) as speech:
        prompt = await call_off_loop(size, speech.template.prompt, request)
        return {"input_tokens": len(prompt.ids)}


def models_reply(path: str, readers: Readers) -> dict[str, Any] | None:
    """Return the reply to `GET /models` or `GET /models/NAME`, or None if there is no such model."""
    models, name = readers.models(), path.removeprefix("/models").removeprefix("/")
    if not name:
        return {"object": "list", "data": models, "has_more": False}
    return next((model for model in models if model["id"] == name), None)


def model_object(name: str, created: float) -> dict[str, Any]:
    """Return OpenAI's `model` object."""
    return {"id": name, "object": "model", "created": int(created), "owned_by": OWNER}
