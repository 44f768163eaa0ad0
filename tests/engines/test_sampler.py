"""Tokens are drawn from the distribution that their logprobs tell of."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import Sampling
from etude.core.errors import EngineError
from etude.engines.kv_slots import Copy, SlotTable
from etude.engines.sampler import LiveRow, append_samples, uniforms
from etude.models.distribution import Adjustment, adjust_logits
from tests.support import one_quick

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -4.0]
DRAWS = 4_000


def sample(logits_BV, samplings, uniform):
    """Token ids [B] and their logprobs [B]."""
    drawn = zip(samplings, uniform, strict=True)
    rows = [LiveRow("", [1], wanted, iter([number])) for wanted, number in drawn]
    append_samples(rows, logits_BV)
    return torch.tensor([row.ids[-1] for row in rows]), torch.tensor([row.logprobs[-1] for row in rows])


def draw(logits, *, temperature=1.0, top_p=1.0, uniform):
    wanted = Sampling(temperature=temperature, top_p=top_p)
    return sample(torch.tensor([logits] * len(uniform)), [wanted] * len(uniform), uniform)


@pytest.mark.parametrize("temperature", one_quick(0.5, 1.0, 2.0))
@pytest.mark.parametrize("top_p", [1.0, 0.8, 0.3])
def test_draws_follow_temperature_and_nucleus(temperature, top_p):
    shape = Adjustment(Sampling(temperature=temperature, top_p=top_p))
    expected = torch.softmax(adjust_logits(torch.tensor([LOGITS]), [shape])[0], dim=-1).tolist()
    stream = uniforms(7)
    ids, logprobs = draw(
        LOGITS, temperature=temperature, top_p=top_p, uniform=[next(stream) for _ in range(DRAWS)]
    )
    counts = torch.bincount(ids, minlength=len(LOGITS)).tolist()
    possible = [token for token, share in enumerate(expected) if share > 0]
    assert sum(counts[token] for token in possible) == DRAWS
    chi_square = sum((counts[t] - DRAWS * expected[t]) ** 2 / (DRAWS * expected[t]) for t in possible)
    assert chi_square < 20.5  # The 99.9 % quantile for five degrees of freedom.
    for token in possible:
        if counts[token]:
            assert logprobs[ids == token][0].item() == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_temperature_zero_takes_the_best_token_and_tells_its_logprob_under_the_model():
    ids, logprobs = draw(LOGITS, temperature=0.0, top_p=0.1, uniform=[0.0, 0.5, 0.999])
    assert ids.tolist() == [0, 0, 0]
    assert logprobs.tolist() == pytest.approx([torch.tensor(LOGITS).log_softmax(0)[0].item()] * 3, abs=1e-6)


@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=8),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([1.0, 0.9, 0.1]),
    st.sampled_from([0.0, 1e-9, 0.5, 1 - 2**-24, 1 - 2**-53]),
)
def test_a_drawn_token_always_has_probability(logits, temperature, top_p, uniform):
    ids, logprobs = draw(logits, temperature=temperature, top_p=top_p, uniform=[uniform])
    assert 0 <= ids[0] < len(logits)
    assert math.isfinite(logprobs[0])


def test_a_sum_that_rises_at_a_token_without_mass_draws_another(monkeypatch):
    """As a device may round that adds in parallel."""
    search = torch.searchsorted
    monkeypatch.setattr(torch, "searchsorted", lambda *given, **how: search(*given, **how) - 1)
    ids, logprobs = sample(torch.tensor([[-torch.inf, 1.0, 0.0]] * 2), [Sampling()] * 2, [0.0, 0.9])
    assert ids.tolist() == [1, 1] and logprobs.isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_an_error(bad):
    with pytest.raises(EngineError, match="not finite"):
        draw([0.0, bad, 1.0], uniform=[0.5])


@pytest.mark.parametrize("words", one_quick(2**12 + 7, 2**12, 50_000))
def test_a_draw_among_many_words_is_where_the_running_sum_of_their_masses_is(words):
    generator = torch.Generator().manual_seed(words)
    logits_BV = torch.randn(64, words, generator=generator) * 3
    logits_BV[:, torch.randperm(words, generator=generator)[: words // 2]] = -torch.inf
    uniform = torch.rand(64, generator=generator).tolist()
    uniform[:3] = [0.0, 0.5, 1 - 2**-24]
    ids, logprobs = sample(logits_BV, [Sampling()] * 64, uniform)
    cdf_BV = torch.softmax(logits_BV.double(), dim=-1).cumsum(dim=-1)
    above, below = cdf_BV.gather(1, ids[:, None])[:, 0], (cdf_BV - torch.softmax(logits_BV.double(), -1))
    below = below.gather(1, ids[:, None])[:, 0]
    drawn_at = torch.tensor(uniform, dtype=torch.float64)
    assert ((below - 1e-5 < drawn_at) & (drawn_at < above + 1e-5)).all()
    assert torch.isfinite(logprobs).all()
    expected = torch.log_softmax(logits_BV.double(), dim=-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


LONG = list(range(100, 200))
"""A prompt that is worth sharing."""


def row(conversation, *ids):
    return LiveRow(conversation, list(ids), Sampling(), iter(()))


def read(table, conversation, *ids, reuse=True):
    """Place a row, read it whole, and release it."""
    one = row(conversation, *ids)
    table.place(one, reuse=reuse)
    shared, one.cached = one.cached, len(ids)
    table.release(one.slot)
    return one.slot, shared


def test_the_next_turn_finds_what_the_last_one_read():
    table = SlotTable(kept=4, least=1)
    slot, _ = read(table, "a", 1, 2, 3)
    assert read(table, "b", 9, 9) != (slot, 0)
    assert read(table, "a", 1, 2, 3, 4, 5) == (slot, 3)
    assert read(table, "a", 1, 2, 8, 8, 8) == (slot, 2)


def test_a_conversation_keeps_its_slot_until_all_are_taken_and_it_is_the_oldest():
    table = SlotTable(kept=10, least=1)
    slots = [read(table, name, 1, 2)[0] for name in "abcdefghij"]
    assert len(set(slots)) == 10
    assert read(table, "a", 1, 2, 3) == (slots[0], 2)
    for name in "uvwxyzUVWX"[: len(table) - 9]:
        read(table, name, 1, 2)
    assert read(table, "b", 1, 2, 3)[1] == 0
    assert read(table, "a", 1, 2, 3, 4)[1] == 3


def place_row(table, conversation, *ids):
    one = row(conversation, *ids)
    table.place(one, reuse=True)
    return one


def test_a_slot_that_has_moved_or_was_taken_is_not_mistaken_for_what_it_held():
    table = SlotTable(kept=2, least=1)
    first = place_row(table, "a", *LONG)
    table.swap(first.slot, 1 - first.slot)
    second = place_row(table, "b", *LONG)
    first.cached = 100
    assert table.copies() == [Copy(first.slot, second.slot, 99)]
    for one in (first, second):
        table.release(one.slot)
    assert {place_row(table, name, 1, 2).slot for name in "cd"} == {0, 1}
    assert not table.waits(place_row(table, "e", *LONG))
    assert table.copies() == []


def test_what_many_begin_with_is_read_once_with_the_same_weights():
    """Agents with system prompts of 500 tokens, 200 examples each."""
    table, count, flying = SlotTable(kept=64, least=1), 0, []
    systems = [[1000 * agent + place for place in range(500)] for agent in range(3)]
    for number in range(600):
        one = place_row(table, f"{number}", *systems[number % 3], *range(9000 + number, 9050 + number))
        flying.append(one)
        table.copies()
        count += len(one.ids) - one.cached
        one.cached = len(one.ids)
        if len(flying) == 16:
            table.release(flying.pop(0).slot)
    assert count == 3 * 500 + 600 * 50
    table.forget()
    assert place_row(table, "next", *systems[0], 1).cached == 0 and not table.copies()
