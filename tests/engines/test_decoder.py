"""Whatever the architecture and the company, a row is sampled from what the model itself says."""

import random

import pytest

from etude.core.call import Sampling
from etude.engines import step_inputs
from etude.engines.decoder import RecomputeDecoder, SlotDecoder
from etude.engines.embedded import make_decoder
from etude.engines.sampler import LiveRow, uniforms
from tests.models.tiny_models import family, policy, true_logprobs
from tests.support import one_quick

SLIDING = {"sliding_window": 16, "head_dim": 8}

IN_SLOTS = {
    "llama": lambda: family("LlamaConfig", num_key_value_heads=4),
    "qwen2": lambda: family("Qwen2Config", use_sliding_window=True, max_window_layers=1, sliding_window=16),
    "qwen3": lambda: family("Qwen3Config", head_dim=8),
    "gemma2": lambda: family("Gemma2Config", **SLIDING, query_pre_attn_scalar=8, attn_logit_softcapping=5.0),
    "gemma3": lambda: family(
        "Gemma3TextConfig", **SLIDING, query_pre_attn_scalar=8, sliding_window_pattern=2
    ),
    "mistral": lambda: family("MistralConfig", **SLIDING),
    "gpt2": lambda: family("GPT2Config", n_positions=512, n_head=4),
}
RECOMPUTED = {
    "mamba": lambda: family("MambaConfig", state_size=4),
    "linear attention and full": lambda: family("Lfm2Config", full_attn_idxs=[1]),
    "positions in the mask": lambda: family("BloomConfig", n_head=4),
    "masks of its own": lambda: family(
        "GPTNeoConfig", num_heads=4, attention_types=[[["global", "local"], 1]], window_size=16
    ),
}


def live(number, ids):
    """A row with random numbers of its own."""
    return LiveRow(str(number), list(ids), Sampling(), uniforms(number))


def drawn_ids(choose, count):
    return [choose.randrange(7, 300) for _ in range(count)]


def rows_of_many_lengths(count, *, tokens=12, seed=0):
    """Rows with prompts of 2 to 70 tokens, and how long each is to become."""
    choose = random.Random(seed)
    rows = [live(number, drawn_ids(choose, choose.choice([2, 3, 9, 20, 70]))) for number in range(count)]
    return rows, {row: len(row.ids) + choose.randrange(1, tokens) for row in rows}


def run(decoder, rows, until, *, start=None):
    """Sample all rows, of which those after `start` join one by one."""
    waiting = list(rows[start:]) if start is not None else []
    active = list(rows[: len(rows) - len(waiting)])
    while active or waiting:
        if waiting:
            active.append(waiting.pop(0))
        decoder.step(active)
        for row in [row for row in active if len(row.ids) >= until[row]]:
            decoder.release(row)
            active.remove(row)


def assert_right(of, rows, tolerance=1e-5):
    for row in rows:
        prompt, sampled = row.ids[: -len(row.logprobs)], row.ids[-len(row.logprobs) :]
        assert row.logprobs == pytest.approx(true_logprobs(of, prompt, sampled), abs=tolerance)


@pytest.mark.parametrize("name", IN_SLOTS)
def test_slots_give_the_models_own_logprobs(name):
    of = IN_SLOTS[name]()
    decoder = make_decoder(of, slots=8, deterministic=False)
    assert isinstance(decoder, SlotDecoder)
    rows, until = rows_of_many_lengths(18, tokens=5)
    run(decoder, rows, until, start=16)
    assert_right(of, rows)


@pytest.mark.parametrize("name", RECOMPUTED)
def test_models_that_hold_more_than_keys_and_values_are_recomputed(name):
    of = RECOMPUTED[name]()
    decoder = make_decoder(of, slots=8, deterministic=False)
    assert isinstance(decoder, RecomputeDecoder)
    rows, until = rows_of_many_lengths(6)
    run(decoder, rows, until, start=4)
    assert_right(of, rows)


def test_a_prompt_is_read_once_for_all_its_samples_and_for_those_who_begin_like_it():
    of = policy(max_context=1024)
    decoder = make_decoder(of, slots=8, deterministic=False)
    prompt = drawn_ids(random.Random(4), 300)
    prompts = [*[prompt] * 6, *([*prompt[:200], *(7 + n,) * 40] for n in range(4))]
    rows = [live(n, ids) for n, ids in enumerate(prompts)]
    decoder.step(rows)
    assert [row.cached for row in rows] == [256, *[0] * 9]  # The length of a chunk.
    decoder.step(rows)
    assert [row.cached for row in rows[6:]] == [240] * 4
    run(decoder, rows, {row: len(row.ids) + 5 for row in rows}, start=8)
    assert len({tuple(row.ids) for row in rows}) == 10
    assert_right(of, rows)


@pytest.mark.parametrize("name", one_quick("llama", "mistral", "gemma2"))
def test_conversations_that_take_turns_keep_what_was_read_wherever_it_is_moved(name):
    of, choose = IN_SLOTS[name](), random.Random(6)
    decoder = make_decoder(of, slots=8, deterministic=False)
    spoken = {str(n): drawn_ids(choose, choose.randrange(1, 40)) for n in range(12)}
    for _ in range(6):
        talks = choose.sample(sorted(spoken), choose.choice([1, 2, 5]))
        rows = [LiveRow(talk, spoken[talk], Sampling(), uniforms(choose.randrange(99))) for talk in talks]
        run(decoder, rows, {row: len(row.ids) + choose.randrange(1, 25) for row in rows})
        assert_right(of, rows)
        for row in rows:
            spoken[row.conversation] = row.ids + drawn_ids(choose, 9)


def test_those_who_wait_go_on_when_the_one_they_wait_for_is_gone():
    of = policy()
    decoder = make_decoder(of, slots=8, deterministic=False)
    ids = [7 + n % 90 for n in range(150)]
    first, second = live(0, ids), live(1, ids)
    decoder.step([first, second])
    late = live(3, ids * 2)
    decoder.step([first, late])
    decoder.release(first)
    for _ in range(4):
        decoder.step([second, late])
    assert_right(of, [second, late])


def test_prompts_longer_than_a_chunk_are_read_in_pieces():
    of = policy(max_context=1024)
    choose = random.Random(3)
    rows = [live(n, drawn_ids(choose, n)) for n in (255, 256, 257, 600)]
    run(make_decoder(of, slots=8, deterministic=False), rows, {row: len(row.ids) + 3 for row in rows})
    assert_right(of, rows)


def test_forgetting_in_the_middle_reads_again_and_goes_on():
    of = policy()
    decoder = make_decoder(of, slots=8, deterministic=False)
    rows, _ = rows_of_many_lengths(5)
    for step in range(8):
        if step == 4:
            decoder.forget()
            assert {row.cached for row in rows} == {0}
        decoder.step(rows)
    assert_right(of, rows)


def test_rows_that_speak_go_on_while_a_long_prompt_is_read():
    of = policy(max_context=1024)
    decoder = make_decoder(of, slots=8, deterministic=False)
    speaking = [live(n, [9, 10 + n]) for n in range(3)]
    decoder.step(speaking)
    late = live(9, [7 + n % 90 for n in range(600)])
    for cached in (256, 512, 600):
        decoder.step([*speaking, late])
        assert late.cached == cached
    assert [len(row.logprobs) for row in (*speaking, late)] == [4, 4, 4, 1]
    assert_right(of, [*speaking, late])


@pytest.mark.parametrize("name", one_quick("gemma3", "llama", "mistral"))
def test_rows_that_attend_alone_are_sampled_from_what_the_model_says(name, monkeypatch):
    monkeypatch.setattr(step_inputs, "_PADDING", 40 * 16)
    of = IN_SLOTS[name]()
    rows, until = rows_of_many_lengths(12)
    run(make_decoder(of, slots=8, deterministic=False), rows, until, start=5)
    assert_right(of, rows)


@pytest.mark.parametrize("name", one_quick("llama", "gemma2", "gpt2"))
def test_a_deterministic_decoder_gives_the_same_bits_whatever_the_company(name):
    of = IN_SLOTS[name]()

    def mine(length, company, start, seed=0):
        row = LiveRow("mine", drawn_ids(random.Random(length), length), Sampling(), uniforms(length))
        others, until = rows_of_many_lengths(company, seed=seed)
        rows = [*others[: company // 2], row, *others[company // 2 :]]
        run(make_decoder(of, slots=8, deterministic=True), rows, until | {row: length + 8}, start=start)
        return row

    for length in (3, 300):
        alone = mine(length, 0, None)
        assert_right(of, [alone])
        for company, start in ((63, None), (5, 2)):
            among = mine(length, company, start, seed=length)
            assert (among.ids, among.logprobs) == (alone.ids, alone.logprobs)


def test_a_deterministic_recomputing_decoder_gives_the_same_bits_whatever_the_company():
    of = RECOMPUTED["mamba"]()

    def mine(company):
        rows = [live(n, range(10, 13 + n % 5)) for n in range(company + 1)]
        run(make_decoder(of, slots=8, deterministic=True), rows, {row: len(row.ids) + 5 for row in rows})
        return rows[0].ids, rows[0].logprobs

    assert mine(0) == mine(6)
