"""The engine: many conversations at once, each as if it were alone."""

import asyncio
import threading
import weakref
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from etude.core.call import ChatRequest, Sampling
from etude.core.errors import EngineError, PromptTooLong
from etude.engines.embedded import EmbeddedEngine
from tests.models.tiny_models import (
    CALCULATOR,
    change_weights,
    chatml_policy,
    fresh_policy,
    make_call,
    policy,
    true_logprobs,
    user,
)


@asynccontextmanager
async def open_engine(of=None, **options):
    engine = EmbeddedEngine(of or policy(), **options)
    try:
        yield engine
    finally:
        await engine.close()


def question(text="what is 1 plus 2?", *, key=1, earlier=(), conversation="", **sampling):
    messages = (user(text),) if isinstance(text, str) else tuple(text)
    return ChatRequest(
        messages,
        sampling=Sampling(**{"max_tokens": 12} | sampling),
        key=key,
        conversation=conversation,
        earlier=tuple(earlier),
    )


class Forward:
    """Stands before a model's forward pass: counts the tokens that it reads, and may break or hold it."""

    def __init__(self):
        self.policy = of = fresh_policy()
        self.read = 0
        self.rows = 0
        self.error = None
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._forward = of.model.forward
        of.model.forward = self

    def __call__(self, *, input_ids, **rest):
        self.entered.set()
        self.gate.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.read += input_ids.numel()
        self.rows = max(self.rows, len(input_ids))
        return self._forward(input_ids=input_ids, **rest)

    async def wait_for_step(self):
        """Returns once the engine's thread waits before the model."""
        await asyncio.to_thread(self.entered.wait)


async def test_a_completion_has_the_prompt_the_sampled_tokens_and_their_logprobs():
    async with open_engine() as engine:
        found = await engine.complete(question())
    assert found.prompt_ids == policy().template.prompt(question()).ids
    assert found.logprobs == pytest.approx(
        true_logprobs(policy(), found.prompt_ids, found.completion_ids), abs=1e-5
    )
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (
        len(found.prompt_ids),
        len(found.completion_ids),
    )
    assert found.model_version == 0


async def test_greedy_is_what_generate_gives():
    async with open_engine() as engine:
        texts = ["a", "what is 3 plus 4?", "it is 5. " * 6]
        found = await asyncio.gather(*(engine.complete(question(text, temperature=0.0)) for text in texts))
    for one in found:
        expected = policy().model.generate(
            torch.tensor([one.prompt_ids]), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        assert one.prompt_ids + one.completion_ids == tuple(expected[0].tolist())


async def test_the_key_decides_and_a_seed_takes_its_place():
    async with open_engine() as engine:
        one, again, other, seeded = await asyncio.gather(
            *(
                engine.complete(request)
                for request in (question(key=1), question(key=1), question(key=2), question(key=2, seed=1))
            )
        )
    assert one.completion_ids == again.completion_ids == seeded.completion_ids != other.completion_ids


async def test_the_next_turn_reads_only_what_is_new():
    forward = Forward()
    async with open_engine(forward.policy) as engine:
        first = question("what is 1 plus 2? " * 20, conversation="c")
        before = await engine.complete(first)
        history = [*first.messages, before.message, user("b")]
        forward.read = 0
        second = question(history, conversation="c", earlier=[make_call(first, before)])
        after = await engine.complete(second)
    sequence = before.prompt_ids + before.completion_ids
    assert after.prompt_ids[: len(sequence)] == sequence
    assert after.usage.prompt_tokens > 80
    # The last sampled token was never read, and the last that is sampled need not be.
    new = after.usage.prompt_tokens - len(sequence) + 1
    assert forward.read == new + after.usage.completion_tokens - 1
    assert after.logprobs == pytest.approx(
        true_logprobs(forward.policy, after.prompt_ids, after.completion_ids), abs=1e-5
    )


async def test_weights_that_change_in_the_middle_are_read_again():
    forward = Forward()
    of = forward.policy
    forward.gate.clear()
    async with open_engine(of) as engine:
        task = asyncio.create_task(engine.complete(question(temperature=0.0, max_tokens=60)))
        await forward.wait_for_step()
        change = asyncio.create_task(asyncio.to_thread(_change_the_weights, of))
        forward.gate.set()
        await change
        found = await task
    new = true_logprobs(of, found.prompt_ids, found.completion_ids)
    # Whatever was sampled after the change, here at least the last token, is the new weights' own.
    assert found.logprobs[-1] == pytest.approx(new[-1], abs=1e-5)
    assert found.model_version == 1


def _change_the_weights(of):
    with of.lock:
        change_weights(of, lambda one: one.mul_(0.7))
        of.mark_changed(1)


async def test_the_memory_of_sampling_goes_before_training_and_comes_back():
    of = fresh_policy()
    async with open_engine(of) as engine:
        request = question(conversation="c", temperature=0.0)
        before = await engine.complete(request)
        held = weakref.ref(engine._decoder._kv)
        for sampler in of.samplers:
            sampler.free_sampling_memory()
        for _ in range(500):
            if held() is None:
                break
            await asyncio.sleep(0.01)
        assert held() is None
        after = await engine.complete(request)
    assert after.completion_ids == before.completion_ids


async def test_max_tokens_and_the_context_cut_a_completion():
    async with open_engine(policy(max_context=64), max_tokens=5) as engine:
        by_default = await engine.complete(question(max_tokens=None, key=3))
        cut = await engine.complete(question(max_tokens=2, key=3))
        full = await engine.complete(question("a " * 30, max_tokens=500, key=3))
    assert (len(by_default.completion_ids), by_default.finish_reason) == (5, "length")
    assert cut.completion_ids == by_default.completion_ids[:2]
    assert full.usage.prompt_tokens + full.usage.completion_tokens == 64
    assert full.finish_reason == "length"


async def test_a_prompt_that_does_not_fit_is_an_error_that_says_so():
    async with open_engine(policy(max_context=64)) as engine:
        with pytest.raises(PromptTooLong, match=r"context is 64 tokens, .* \d+; "):
            await engine.complete(question("1 2 " * 60))


async def test_stop_strings_end_the_text_before_them():
    async with open_engine() as engine:
        some = await asyncio.gather(*(engine.complete(question(max_tokens=40, key=key)) for key in range(8)))
        key, free = max(enumerate(some), key=lambda pair: len(pair[1].message["content"]))
        text = free.message["content"]
        stop = text[7:10]
        cut = await engine.complete(question(max_tokens=40, key=key, stop=("never said", stop)))
    assert cut.message["content"] == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.completion_ids == free.completion_ids[: len(cut.completion_ids)]
    decode = policy().template.decode
    assert stop in decode(cut.completion_ids)
    assert stop not in decode(cut.completion_ids[:-1])


async def test_tool_calls_are_parsed_and_numbered_through_the_conversation():
    of = chatml_policy()
    call = '<tool_call>{"name": "calculator", "arguments": {"a": 1}}</tool_call>'
    of.template.decode = lambda ids: call  # The policy is random; what it says is put into its mouth.
    async with open_engine(of) as engine:
        end = ((min(of.codec.stop_ids), 100.0),)
        first = replace(question(logit_bias=end), tools=(CALCULATOR,))
        found = await engine.complete(first)
        result = {"role": "tool", "tool_call_id": "call00000", "content": "3"}
        second = replace(question([*first.messages, found.message, result]), tools=(CALCULATOR,))
        again = await engine.complete(second)
    assert (found.finish_reason, again.finish_reason) == ("tool_calls", "length")  # The second was cut off.
    assert [one.message["tool_calls"][0]["id"] for one in (found, again)] == ["call00000", "call00001"]


async def test_a_cancelled_request_frees_its_place():
    forward = Forward()
    forward.gate.clear()
    async with open_engine(forward.policy) as engine:
        engine._decoder.most_rows = 1
        endless = asyncio.create_task(engine.complete(question(max_tokens=400)))
        waiting = asyncio.create_task(engine.complete(question(key=2)))
        patient = asyncio.create_task(engine.complete(question(key=3)))
        await forward.wait_for_step()
        endless.cancel()
        waiting.cancel()
        forward.gate.set()
        assert (await patient).completion_ids
        assert endless.cancelled()
        assert waiting.cancelled()
    assert forward.read < 200 and forward.rows == 1


async def test_a_model_that_breaks_fails_all_who_wait_and_the_engine_goes_on():
    forward = Forward()
    forward.error = RuntimeError("no memory")
    async with open_engine(forward.policy) as engine:
        found = await asyncio.gather(
            *(engine.complete(question(key=key)) for key in range(3)), return_exceptions=True
        )
        broken = [one for one in found if isinstance(one, Exception)]
        assert broken
        for error in broken:
            assert isinstance(error, EngineError)
            assert "the engine failed: RuntimeError: no memory" in str(error)
        after = await engine.complete(question())
    assert after.logprobs == pytest.approx(
        true_logprobs(forward.policy, after.prompt_ids, after.completion_ids), abs=1e-5
    )


async def test_closing_fails_what_is_in_flight_and_what_comes_later():
    forward = Forward()
    forward.gate.clear()
    engine = EmbeddedEngine(forward.policy)
    engine._decoder.most_rows = 1
    tasks = [asyncio.create_task(engine.complete(question(key=key, max_tokens=400))) for key in range(2)]
    await forward.wait_for_step()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    forward.gate.set()
    await closing
    for task in tasks:
        with pytest.raises(EngineError, match="engine was closed"):
            await task
    with pytest.raises(EngineError, match="engine is closed"):
        await engine.complete(question())
    await engine.close()
