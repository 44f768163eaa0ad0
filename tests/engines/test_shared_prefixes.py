"""A prefix that rows share is read once, and what is sampled is what it would be without that."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.sample import shared_length
from etude.engines import decoder as decoders
from etude.engines import step_inputs as module
from etude.engines.embedded import make_decoder
from etude.engines.step_inputs import Prefix, shared_prefixes
from tests.engines.test_decoder import assert_right, drawn_ids, live, run
from tests.models.tiny_models import family, policy
from tests.support import draws, one_quick

MODELS = {
    "llama": lambda: family("LlamaConfig"),
    "a key for each query": lambda: policy(max_context=512),
    "qwen3": lambda: family("Qwen3Config", head_dim=16),
    "gemma3, narrow and wide": lambda: family(
        "Gemma3TextConfig", head_dim=16, query_pre_attn_scalar=16, sliding_window=64, sliding_window_pattern=2
    ),
}


@pytest.fixture
def cheap(monkeypatch):
    """Calls cost next to nothing, so that the shortest prefix counts."""
    monkeypatch.setattr(module, "_PREFIX", 10)


@pytest.fixture
def prefixes(monkeypatch):
    """All that were found, by the rows that were looked at."""
    seen = []

    def seeing(*args):
        seen.append(shared_prefixes(*args))
        return seen[-1]

    monkeypatch.setattr(decoders, "shared_prefixes", seeing)
    return seen


def make_rows(choose, groups, most, system):
    """Rows of some prompts, all of which may begin with the same tokens, in any order."""
    start = drawn_ids(choose, system)
    rows = []
    for group in range(groups):
        prompt = start + drawn_ids(choose, choose.choice([1, 9, 40, 90]))
        for number in range(choose.randrange(1, most + 1)):
            own = drawn_ids(choose, choose.choice([0, 0, 3, 20]))
            rows.append(live(100 * group + number // 2, prompt + own))  # Two have the same random numbers.
    choose.shuffle(rows)
    return rows


def sample(of, seed, groups, most, system, *, cost):
    """As rows join one by one, and finish when they like."""
    choose = random.Random(seed)
    rows = make_rows(choose, groups, most, system)
    until = {row: len(row.ids) + choose.randrange(2, 24) for row in rows}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PREFIX", cost)
        patch.setattr(module, "_PADDING", min(cost, 2000))
        run(make_decoder(of, slots=8, deterministic=False), rows, until, start=len(rows) // 2)
    return rows


@settings(max_examples=draws(4), deadline=None, derandomize=True)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([0, 8, 70]),
    st.sampled_from([50, 3000]),
    st.sampled_from(sorted(MODELS)),
)
def test_tokens_and_logprobs_are_those_without_sharing(seed, groups, most, system, cost, name):
    of = MODELS[name]()
    plain = sample(of, seed, groups, most, system, cost=2**60)
    shared = sample(of, seed, groups, most, system, cost=cost)
    differ = 0
    for one, other in zip(plain, shared, strict=True):
        same = shared_length(one.ids, other.ids) - len(one.ids) + len(one.logprobs)
        assert one.logprobs[:same] == pytest.approx(other.logprobs[:same], abs=1e-5)
        differ += one.ids != other.ids
    assert differ <= 1  # A number may fall on the border of two tokens, where rounding decides.
    assert_right(of, shared)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", one_quick(torch.float32, torch.bfloat16))
def test_a_prefix_is_shared_beside_prompts_that_are_read_and_where_slots_are_not_next_to_each_other(
    name, dtype, cheap, prefixes
):
    of = MODELS[name]().twin()
    of.model.to(dtype)
    prompt, decoder = drawn_ids(random.Random(3), 30), make_decoder(of, slots=8, deterministic=False)
    rows = [live(n, prompt) for n in range(5)]
    while not all(row.logprobs for row in rows):
        decoder.step(rows)
    assert prefixes[0] == [Prefix((0, 1, 2, 3, 4), 29)]  # The last token of a prompt is read by each row.
    decoder.release(rows.pop(2))
    rows.append(live(9, range(20, 60)))
    decoder.step(rows[::-1])
    assert [row.slot for row in rows[:4]] == [0, 1, 3, 4]
    assert prefixes[-1][0].rows == (0, 1, 2, 3) and prefixes[-1][0].length >= 29
    for _ in range(6):
        decoder.step(rows)
    of.model.float()
    assert_right(of, rows, 1e-5 if dtype == torch.float32 else 0.1)


def test_rows_are_computed_once_as_long_as_their_tokens_are_the_same(monkeypatch):
    of = MODELS["llama"]()
    decoder = make_decoder(of, slots=8, deterministic=False)
    rows, computed = [live(n // 3, range(20, 50)) for n in range(6)], []
    head, linear = decoder._fused._head, decoder._fused._head.linear
    monkeypatch.setattr(head, "linear", lambda x: computed.append(len(x)) or linear(x))
    decoder.step(rows)  # The first row reads the prompt but for its last token.
    for _ in range(8):
        different = {tuple(row.ids) for row in rows}
        decoder.step(rows)
        assert computed.pop() == len(different)
    assert len(different) == 2
    assert_right(of, rows)
