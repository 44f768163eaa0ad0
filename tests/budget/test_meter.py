"""The meter: every call of an engine is counted, once, for whom it was made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from etude.budget.bill import MeteredEngine, Purpose, asking_for, most_tokens
from etude.config.load import parse_config
from etude.core.call import ChatRequest, Completion, Sampling, Usage
from etude.core.errors import EngineError
from etude.wire.retries import note_charged

REQUEST = ChatRequest(({"role": "user", "content": "What is 2 + 2?"},))
LLMS = parse_config(
    {
        "llms": {
            "policy": {"_type": "openai", "model_name": "m", "max_tokens": 30},
            "older": {"_type": "opponents", "of": "policy"},
        },
        "finetuning": {"target_model": "policy"},
    }
).llms


class Engine:
    """Takes 10 tokens to read and 5 to answer, and 7 before that for nothing."""

    version = 2

    def __init__(self) -> None:
        self.requests: list[ChatRequest] = []
        self.fails = False

    async def complete(self, request: ChatRequest) -> Completion:
        self.requests.append(request)
        note_charged(Usage(6, 1))
        if self.fails:
            raise EngineError("no answer")
        return Completion({"role": "assistant", "content": "4"}, usage=Usage(10, 5, 4), model_version=2)

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        return (0.0,) * len(ids)


class Account:
    """Writes down what it is told."""

    def __init__(self, *, bounds_calls: bool = False) -> None:
        self.bounds_calls = bounds_calls
        self.held: list[Usage] = []
        self.settled: list[Any] = []

    async def hold(self, model: str, most: Usage) -> int:
        self.held.append(most)
        return len(self.held)

    async def settle(self, number: Any, model: str, purpose: Purpose, usage: Usage, version: int) -> None:
        self.settled.append((number, model, purpose, usage, version))


async def test_a_call_is_counted_for_whom_it_was_made_with_what_it_cost_before_it_was_answered():
    account = Account()
    engine = MeteredEngine("policy", Engine(), account, LLMS)
    with asking_for("judge", "validation/5/t1/0"):
        await engine.complete(REQUEST)
    with asking_for("teacher", "train/3.2/t1/0"):
        assert await engine.score([1, 2, 3]) == (0.0, 0.0, 0.0)
    await engine.complete(REQUEST)
    usage = Usage(16, 6, 4)
    assert account.settled == [
        (None, "policy", Purpose("judge", "validation/5"), usage, 2),
        (None, "policy", Purpose("teacher", "train/3"), Usage(3, 1), 2),
        (None, "policy", Purpose("other", ""), usage, 2),
    ]


async def test_what_a_failed_call_was_charged_counts():
    engine, account = Engine(), Account()
    engine.fails = True
    with pytest.raises(EngineError):
        await MeteredEngine("policy", engine, account, LLMS).complete(REQUEST)
    assert account.settled[0][3:] == (Usage(6, 1), 0)


async def test_opponents_are_opponents_whoever_calls_them():
    account = Account()
    with asking_for("agent", "train/1/t1/0"):
        await MeteredEngine("older", Engine(), account, LLMS).complete(REQUEST)
    assert account.settled[0][2] == Purpose("opponent", "train/1")


async def test_where_calls_are_bounded_an_answer_has_the_configs_longest():
    engine, account = Engine(), Account(bounds_calls=True)
    await MeteredEngine("policy", engine, account, LLMS).complete(REQUEST)
    assert engine.requests[0].sampling.max_tokens == 30
    assert account.held[0].completion_tokens == 30
    assert account.settled[0][0] == 1


@pytest.mark.parametrize("text", ["What is 2 + 2?", "日本語のテキスト", "\x00\x01\x02", "a" * 5000])
def test_a_prompt_has_no_more_tokens_than_bytes(text: str):
    tokenizer = pytest.importorskip("etude.models.tiny").build_tokenizer(["t0?"], splits=[])
    most = most_tokens(ChatRequest(({"role": "user", "content": text},), sampling=Sampling(max_tokens=7)))
    assert most.prompt_tokens >= len(tokenizer(text)["input_ids"])
    assert most.completion_tokens == 7
    assert most_tokens(ChatRequest((), prompt=(1, 2, 3))).prompt_tokens == 3


def test_an_image_is_not_counted_by_its_bytes():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 10**6}}
    parts = [{"type": "text", "text": "What is this?"}, image]
    assert most_tokens(ChatRequest(({"role": "user", "content": parts},))).prompt_tokens < 50_000
