"""Runners sample from endpoints themselves, by the version that the head has adopted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from etude.core.interfaces import bare
from etude.core.job import ModelVersion
from tests.json_server import JsonServer
from tests.runners.playing import config_with, examples, opened, stored


class Endpoint(JsonServer):
    """Answers with the name of the model that it was asked for."""

    def __init__(self) -> None:
        super().__init__(self._complete)
        self.asked: list[tuple[str, str]] = []
        """Models, with the keys that were shown."""

    def _complete(self, path: str, headers: Message, body: bytes) -> tuple[int, Any]:
        model = json.loads(body)["model"]
        self.asked.append((model, headers["authorization"]))
        message = {"role": "assistant", "content": model}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return 200, {"choices": [choice], "usage": usage, "model": model}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with Endpoint() as server:
        yield server


async def test_runners_sample_from_endpoints_themselves(tmp_path: Path, endpoint: Endpoint):
    """With the key that the config says, and from the version that was adopted last."""
    llm = {"_type": "openai", "model_name": "base", "api_key": "sk-secret", "logprobs": False}
    llm["base_url"] = endpoint.url
    config = config_with(llm, isolation="process", runners=1)
    async with opened(tmp_path / "run", config, None) as runtime:
        engine = bare(runtime.engines["policy"])
        complete, sampled_here = engine.complete, []

        async def noted(request: Any) -> Any:
            sampled_here.append(request)
            return await complete(request)

        engine.complete = noted  # type: ignore[method-assign]
        await runtime.evaluation.run(examples(""), phase="before")
        await engine.adopt(ModelVersion(number=1, location="tuned", digest="d"))
        await runtime.evaluation.run(examples(""), phase="after")
    assert sampled_here == []
    assert endpoint.asked == [("base", "Bearer sk-secret")] * 2 + [("tuned", "Bearer sk-secret")] * 2
    _, records = stored(tmp_path / "run")
    assert [record.output for record in records] == ["tuned", "base"]
    answers = [call.completion for record in records for call in record.calls]
    assert [answer.model_version for answer in answers if answer is not None] == [1, 1, 0, 0]
    assert "sk-secret" not in (tmp_path / "run" / "runners" / "1.log").read_text()
