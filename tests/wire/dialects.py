"""An endpoint over a scripted handler, for tests of the APIs that agents speak."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anthropic
import openai

from etude.core.call import Completion, Usage
from etude.core.errors import EngineError
from etude.core.message import Message
from etude.wire.dialect import ChatBody, RecordedCompletion
from etude.wire.http_server import Endpoint

ASK = [{"role": "user", "content": "hi"}]
TOOL_CALL = {"id": "call_7", "type": "function", "function": {"name": "add", "arguments": '{"a":1,  "b":2}'}}
CALLING: Message = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}


def completion(message: str | Message, **fields: Any) -> Completion:
    said = {"role": "assistant", "content": message} if isinstance(message, str) else message
    reason = "tool_calls" if said.get("tool_calls") else "stop"
    return Completion(said, **{"finish_reason": reason, "usage": Usage(5, 2), **fields})


class Scripted:
    """Answers in order, and keeps what was asked."""

    def __init__(self, *answers: str | Message | Completion | EngineError) -> None:
        self._answers: Sequence[Any] = answers
        self.asked: list[ChatBody] = []

    async def __call__(self, body: ChatBody) -> RecordedCompletion:
        answer = self._answers[min(len(self.asked), len(self._answers) - 1)]
        self.asked.append(body)
        if isinstance(answer, EngineError):
            raise answer
        made = answer if isinstance(answer, Completion) else completion(answer)
        return RecordedCompletion(f"chatcmpl-{len(self.asked)}", "policy", completion=made)


def openai_client(endpoint: Endpoint) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key, max_retries=0)


def anthropic_client(endpoint: Endpoint, **options: str) -> anthropic.AsyncAnthropic:
    settings = {"base_url": endpoint.anthropic_base_url, "api_key": endpoint.api_key, **options}
    return anthropic.AsyncAnthropic(**settings)
