"""Drafts change how many forward passes there are, and nothing that is sampled, whatever they say."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import Sampling
from etude.inference import drafter
from etude.inference.decoder import make_decoder
from etude.inference.drafter import Drafter
from etude.inference.embedded import EmbeddedEngine
from etude.inference.engine import TokenRequest
from etude.inference.prompt_lookup import MOST, PromptLookup
from etude.inference.sampler import Row, uniforms
from tests.inference.test_decoder import assert_right, run
from tests.models.tiny_models import family, fresh_policy, policy

SAMPLINGS = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.6, top_k=9)]


class Told:
    """Drafts that are right, wrong, or right for a while, from what is known to be sampled."""

    def __init__(self, answers, choose):
        self.answers = answers
        self.choose = choose

    def drafts(self, rows):
        return [self._draft(row) for row in rows]

    def _draft(self, row):
        if row.top:
            return []
        done = len(row.logprobs)
        draft = list(self.answers[row.conversation][done : done + self.choose.randrange(9)])
        if draft and self.choose.random() < 0.5:
            draft[self.choose.randrange(len(draft))] = self.choose.randrange(7, 300)
        return draft


def rows_of(choose, count):
    rows = []
    for number in range(count):
        ids = [choose.randrange(7, 300) for _ in range(choose.choice([1, 2, 9, 40]))]
        sampling = choose.choice(SAMPLINGS)
        top = 2 if choose.random() < 0.2 else 0
        rows.append(Row(str(number), ids, sampling, uniforms(choose.randrange(99)), top=top))
    return rows


def both_ways(of, seed, count, tokens, *, forget=False):
    """The same rows without drafts, and with drafts of all kinds."""
    plain, drafted = rows_of(random.Random(seed), count), rows_of(random.Random(seed), count)
    until = {row: len(row.ids) + tokens for rows in (plain, drafted) for row in rows}
    starts = {row.conversation: len(row.ids) for row in plain}
    run(make_decoder(of, slots=4, deterministic=False), plain, until, start=count // 2)
    decoder = make_decoder(of, slots=4, deterministic=False, speculates=True)
    answers = {row.conversation: row.ids[starts[row.conversation] :] for row in plain}
    decoder._drafter = Told(answers, random.Random(seed))
    if forget:
        for _ in range(3):
            decoder.step(drafted)
        decoder.forget()
    run(decoder, drafted, until, start=count // 2)
    return plain, drafted


def assert_same(plain, drafted):
    for one, other in zip(plain, drafted, strict=True):
        assert one.ids == other.ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert [[token for token, _ in best] for best in one.top_logprobs] == [
            [token for token, _ in best] for best in other.top_logprobs
        ]


@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 16), st.booleans())
def test_whatever_the_drafts_say_the_tokens_and_logprobs_are_those_without(seed, count, tokens, forget):
    assert_same(*both_ways(policy(), seed, count, tokens, forget=forget))


@pytest.mark.parametrize("name", ["MistralConfig", "Qwen3Config", "Gemma3TextConfig"])
def test_so_they_are_where_attention_is_narrow_and_heads_are_normed(name):
    sizes = {} if name == "Qwen3Config" else {"sliding_window": 16}
    assert_same(*both_ways(family(name, head_dim=8, **sizes), 5, 6, 16))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=60), st.lists(st.integers(1, 5), max_size=20))
def test_a_draft_is_what_followed_the_last_occurrence_however_the_row_grew(ids, steps):
    lookup, end = PromptLookup(0.5), 0
    for step in [*steps, len(ids)]:
        end = min(end + step, len(ids))
        found = lookup.draft(ids[:end])
        places = [place for place in range(3, end) if ids[place - 3 : place] == ids[end - 3 : end]]
        expected = []
        for offset in range(MOST if places and end >= 3 else 0):
            place = places[-1] + offset
            expected.append(ids[place] if place < end else expected[place - end])
        assert found == expected


def test_a_lookup_sees_how_often_it_was_right():
    lookup = PromptLookup(0.5)
    assert lookup.draft([1, 2, 3, 4, 5, 1, 2, 3])[:3] == [4, 5, 1]
    assert lookup.outcomes([1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 9, 9]) == [True, True, False]


def forward_passes(of, monkeypatch, rows, tokens, *, speculates):
    decoder = make_decoder(of, slots=8, deterministic=False, speculates=speculates)
    logits, passes = type(decoder._fused).logits, []
    monkeypatch.setattr(type(decoder._fused), "logits", lambda *given: passes.append(0) or logits(*given))
    run(decoder, rows, {row: len(row.ids) + tokens for row in rows})
    monkeypatch.undo()
    return len(passes)


def test_greedy_text_that_goes_in_circles_takes_far_fewer_forward_passes(monkeypatch):
    of, passes, ids = policy(), {}, {}
    for speculates in (False, True):
        rows = [Row(str(n), [9 + n, 10], Sampling(temperature=0.0), uniforms(n)) for n in range(3)]
        passes[speculates] = forward_passes(of, monkeypatch, rows, 200, speculates=speculates)
        ids[speculates] = [row.ids for row in rows]
        assert_right(of, rows)
    assert ids[True] == ids[False]
    assert passes[True] * 3 < passes[False] * 2 == 400


def test_text_in_which_drafts_are_wrong_takes_hardly_a_pass_more(monkeypatch):
    """They are tried only as long as it is not known."""
    of = policy()
    wide = []
    monkeypatch.setattr(PromptLookup, "draft", lambda lookup, ids: [5] * MOST)
    monkeypatch.setattr(PromptLookup, "outcomes", lambda lookup, ids: [False])
    decoder = make_decoder(of, slots=8, deterministic=False, speculates=True)
    decoder._drafter = Drafter(is_small=False)
    ragged_pass = decoder._pass
    decoder._pass = lambda speaking, drafts, *rest: (
        wide.extend(drafts) or ragged_pass(speaking, drafts, *rest)
    )
    row = Row("a", [9, 10, 11], Sampling(), uniforms(0))
    run(decoder, [row], {row: 203})
    assert 0 < len(wide) < 8


def test_rows_whose_shape_changes_or_whose_likeliest_are_asked_for_have_no_drafts():
    one = Row("a", [1, 2, 3] * 5, Sampling(repetition_penalty=1.2), uniforms(0))
    other = Row("b", [1, 2, 3] * 5, Sampling(), uniforms(0), top=1)
    assert Drafter(is_small=False).drafts([one, other]) == []
    constant = Row("c", [1, 2, 3] * 5, Sampling(temperature=0.5), uniforms(0))
    assert [bool(draft) for draft in Drafter(is_small=False).drafts([one, constant])] == [False, True]
    many = [Row(str(n), [1, 2, 3] * 5, Sampling(), uniforms(0)) for n in range(drafter._MOST_ROWS + 1)]
    assert Drafter(is_small=False).drafts(many) == []


async def answers_of(of, requests, *, speculates, **options):
    """The answers, and the tokens that were handed over one by one."""
    engine = EmbeddedEngine(of, speculates=speculates, **options)
    told = [list[int]() for _ in requests]
    if speculates:
        engine._decoder._drafter._apart = -1.0  # However small the model is, drafts are to be read.
    try:
        found = await asyncio.gather(
            *(
                engine.sample(request, lambda token, one=one: one.append(token.id))
                for request, one in zip(requests, told, strict=True)
            )
        )
    finally:
        await engine.close()
    assert told == [list(one.ids) for one in found]
    return found


@pytest.mark.parametrize(
    "changes",
    [{"max_tokens": 41}, {"max_tokens": 60, "stop_token_ids": True}, {"max_tokens": 60, "stop": True}],
)
async def test_what_ends_an_answer_within_an_accepted_run_ends_it_there(changes):
    of = policy()
    prompts = [(9, 10), (11, 12), (13, 14, 15)]
    free = [TokenRequest(ids, Sampling(temperature=0.0, max_tokens=60)) for ids in prompts]
    known = await answers_of(of, free, speculates=False)
    requests = []
    for request, answer in zip(free, known, strict=True):
        last = answer.ids[-5]
        own = {name: value for name, value in changes.items() if value is not True}
        if "stop_token_ids" in changes:
            own["stop_token_ids"] = (last,)
        if "stop" in changes:
            own["stop"] = (of.template.decode(answer.ids[-6:-3]),)
        requests.append(TokenRequest(request.prompt_ids, Sampling(temperature=0.0, **own)))
    plain = await answers_of(of, requests, speculates=False)
    drafted = await answers_of(of, requests, speculates=True)
    for one, other in zip(plain, drafted, strict=True):
        assert (one.ids, one.text, one.finish_reason) == (other.ids, other.text, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


async def test_a_request_that_is_cancelled_within_a_run_leaves_the_slot_as_it_should_be():
    of = policy()
    engine = EmbeddedEngine(of, speculates=True)
    engine._decoder._drafter._apart = -1.0
    sampling = Sampling(temperature=0.0, max_tokens=400)
    came, loop = asyncio.Event(), asyncio.get_running_loop()
    heard = []

    def hear(token):
        heard.append(token.id)
        if len(heard) == 200:
            came.set()

    task = loop.create_task(engine.sample(TokenRequest((9, 10), sampling, conversation="c"), hear))
    await asyncio.wait_for(came.wait(), 60)
    task.cancel()
    again = TokenRequest((9, 10, *heard[:150], 9), sampling=Sampling(max_tokens=9), conversation="c")
    found = await engine.sample(again)
    await engine.close()
    (alone,) = await answers_of(of, [again], speculates=False)
    assert found.ids == alone.ids
    assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


def test_what_old_weights_drew_ahead_is_dropped_with_them():
    of = fresh_policy()
    decoder = make_decoder(of, slots=8, deterministic=False, speculates=True)
    decoder._drafter._apart = -1.0
    row = Row("a", [9, 10], Sampling(temperature=0.0), uniforms(0))
    while not row.ahead:
        decoder.step([row])
    decoder.release(Row("nobody", [1], Sampling(), uniforms(0)))
    with torch.no_grad():
        for parameter in of.trainable().values():
            parameter.mul_(0.7)
    decoder.forget()
    assert not row.ahead
    before = len(row.ids)
    run(decoder, [row], {row: before + 20})
    late = Row("late", row.ids[:before], Sampling(temperature=0.0), uniforms(0))
    run(make_decoder(of, slots=8, deterministic=False), [late], {late: before + 20})
    assert row.ids == late.ids
    assert row.logprobs[-20:] == pytest.approx(late.logprobs, abs=1e-5)
