"""Long work on a request leaves the event loop to others."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from etude.wire.gateway import Gateway

LONG = "x" * 100_000


class Patient:
    """A tokenizer, and all else that is asked of a model, that has its answer once the loop has turned."""

    def __init__(self) -> None:
        self.turned = threading.Event()
        self.template = SimpleNamespace(prompt=lambda request: SimpleNamespace(ids=self._ids()))
        self.tokenizer = lambda text, **options: {"input_ids": self._ids()}
        self.max_context = 8

    def _ids(self) -> list[int]:
        assert self.turned.wait(10), "the loop did not turn"
        return [1, 2]

    def models(self) -> list[dict[str, Any]]:
        return []

    @asynccontextmanager
    async def reader(self, model: str) -> AsyncIterator[Patient]:
        asyncio.get_running_loop().call_later(0.01, self.turned.set)
        yield self


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages/count_tokens", {"model": "m", "messages": [{"role": "user", "content": LONG}]}),
    ],
)
async def test_the_loop_turns_while_a_long_prompt_is_tokenised(path: str, body: dict[str, Any]) -> None:
    async def nobody(asked: Any) -> Any:
        raise AssertionError

    answer = await Gateway(nobody, readers=Patient()).answer("POST", path, {}, json.dumps(body).encode())
    assert answer.status == 200, answer.content
    read = answer.as_httpx().json()
    assert 2 in (read.get("count"), read.get("input_tokens"))
