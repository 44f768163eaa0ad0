"""Recorded passes sample what plain ones do, for as long as what they read is where it was.

On a CPU a recording is a list of operations on the same memory; on a GPU it is a CUDA graph.
"""

import logging
import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from etude.config.finetuning import LoraOptions
from etude.core.call import Sampling
from etude.engines import graph_decoder
from etude.engines.embedded import make_decoder, tried_graph_decoder
from etude.engines.graph_decoder import GraphDecoder, PassShape, cuda_graphs
from etude.engines.sampler import LiveRow, uniforms
from etude.models.device import choose_device
from etude.models.policy import Policy
from tests.engines.test_decoder import assert_right, drawn_ids, live, rows_of_many_lengths, run
from tests.engines.test_fused_llama import FUSED, randomise
from tests.models.tiny_models import policy
from tests.pretrained import needs_real_model, real_model
from tests.support import one_quick

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


class Recorder:
    """Operations in a row, each on the tensors that it had."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, function):
        self.recorded += 1
        plain = tuple(each.clone() for each in function())
        replay = make_fx(lambda: function(), pre_dispatch=False)()

        def count_replay():
            self.replayed += 1
            return replay()

        return plain, count_replay


def attend_plainly(query_NHD, held, spans, scale, window):
    """The flash kernel by its definition, with all columns of each token's slot."""
    place_N, column_S = torch.arange(len(query_NHD)), torch.arange(held.keys.shape[2])
    row_N = torch.searchsorted(spans.ends[1:], place_N, right=True).clamp(max=len(spans.slots) - 1)
    keys, values = (each[spans.slots[row_N].long()] for each in (held.keys, held.values))
    position_N1 = (spans.lengths[row_N] - spans.ends[row_N + 1] + place_N)[:, None]
    hidden = column_S > position_N1
    if window is not None:
        hidden |= column_S <= position_N1 - window
    mask = torch.where(hidden, -torch.inf, 0.0)[:, None, None].to(query_NHD.dtype)
    query = query_NHD[:, :, None]
    mixed = functional.scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=True)
    return mixed[:, :, 0]


def make_graph_decoder(of, record=None):
    return GraphDecoder(of, record or Recorder(), attend_plainly)


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    monkeypatch.setattr(graph_decoder, "_ROWS", 64)
    monkeypatch.setattr(graph_decoder, "_COLUMNS", 64)


@pytest.mark.parametrize("name", one_quick("mistral", *sorted(FUSED.keys() - {"mistral"})))
def test_replayed_passes_give_the_models_own_logprobs(name):
    of, record = FUSED[name](), Recorder()
    rows, until = rows_of_many_lengths(9, tokens=30)
    run(make_graph_decoder(of, record), rows, until, start=3)
    assert record.replayed > 2 * record.recorded
    assert_right(of, rows, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trial_finds_out_what_is_not_the_models_own(dtype):
    def halve(*args):
        return attend_plainly(*args) * 0.5

    of = randomise(policy().twin())
    of.model.to(dtype)
    with torch.inference_mode():
        decoder = make_graph_decoder(of)
        assert decoder.why_wrong() is None
        assert "off by" in GraphDecoder(of, Recorder(), halve).why_wrong()
    row = live(0, [3, 7, 5, 9])
    decoder.step([row])
    assert_right(of, [row], 0.1 if dtype == torch.bfloat16 else 1e-4)


@pytest.mark.slow
@needs_real_model
def test_the_trial_takes_a_real_model_in_bfloat16_for_right_and_wrong_attention_for_wrong():
    def decoder(share):
        # A list of the operations would take a minute to make.
        return GraphDecoder(of, lambda make: (make(), make), lambda *args: attend_plainly(*args) * share)

    of = Policy.load(real_model(), dtype="bfloat16")
    with torch.inference_mode():
        assert decoder(1.0).why_wrong() is None
        assert "off by" in decoder(0.9).why_wrong()


def test_without_its_kernels_a_model_is_sampled_by_its_own_modules(caplog):
    assert tried_graph_decoder(policy()) is None
    assert "own modules" in caplog.text


def test_passes_are_filled_up_to_a_few_shapes():
    ones, prompts = ([PassShape.from_counts([count] * rows) for rows in range(1, 1025)] for count in (1, 3))
    assert len(set(ones)) <= 36 and len(set(prompts)) <= 12
    assert all(shape.rows >= rows for rows, shape in enumerate(ones, 1))
    assert all(shape.rows >= rows and shape.tokens >= 3 * rows for rows, shape in enumerate(prompts, 1))
    assert PassShape.from_counts([1] * 17) == PassShape(24, 24, 1)
    assert PassShape.from_counts([1] * 63 + [30]) == PassShape(256, 64, 512)


def test_prompts_are_read_beside_single_tokens_and_once_for_all_that_begin_alike():
    of = policy(max_context=2048)
    prompt, first = drawn_ids(random.Random(4), 600), live(99, [9, 10])
    decoder = make_graph_decoder(of)
    decoder.step([first])
    rows = [first, *(live(n, prompt) for n in range(5))]
    assert decoder.step(rows) == [first]
    assert [row.cached for row in rows] == [3, 512, 0, 0, 0, 0]
    decoder.step(rows)
    decoder.step(rows)
    assert [len(row.logprobs) for row in rows] == [4, 2, 1, 1, 1, 1]
    run(decoder, rows, {row: len(row.ids) + 3 for row in rows})
    assert_right(of, rows, 1e-4)


def test_conversations_keep_what_was_read_and_are_read_again_once_slots_grow():
    of, choose = policy(max_context=2048), random.Random(6)
    decoder = make_graph_decoder(of)
    spoken = {str(n): drawn_ids(choose, 20) for n in range(6)}
    for turn in range(5):
        talks = choose.sample(sorted(spoken), 4)
        rows = [LiveRow(talk, spoken[talk], Sampling(), uniforms(choose.randrange(99))) for talk in talks]
        columns = decoder._kv.columns
        run(decoder, rows, {row: len(row.ids) + 10 + 20 * turn for row in rows})
        assert_right(of, rows, 1e-4)
        for row in rows:
            spoken[row.conversation] = row.ids + drawn_ids(choose, 3)
        again = LiveRow(talks[0], spoken[talks[0]], Sampling(), uniforms(1))
        decoder._take_in([again])
        assert again.cached == len(again.ids) - 4 or decoder._kv.columns > columns
        decoder.release(again)
    assert decoder._kv.columns > 64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", one_quick("tied embeddings", "gemma3", "qwen3"))
def test_new_weights_are_sampled_from_in_the_same_memory_and_elsewhere(name, dtype):
    of, record = FUSED[name]().twin(), Recorder()
    of.model.to(dtype)
    of.use_lora(LoraOptions(r=4), seed=0)
    decoder, row = make_graph_decoder(of, record), live(0, [9, 10])
    run(decoder, [row], {row: 12})
    recorded, draw = record.recorded, torch.Generator().manual_seed(1)
    for elsewhere in (False, True):
        with torch.no_grad():
            for weight in of.model.parameters():
                weight.data = weight.data.clone() if elsewhere else weight.data
                weight.add_(torch.empty_like(weight).normal_(0, 0.05, generator=draw))
        decoder.forget()
        row = live(1, [9, 10])
        run(decoder, [row], {row: 12})
        assert_right(of, [row], 1e-4 if dtype == torch.float32 else 0.2)
        assert (record.recorded > recorded + 1) == elsewhere  # One is the weights' own.


class Launches(TorchDispatchMode):
    """Counts operations."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_a_token_of_all_rows_is_a_copy_and_a_replay():
    def count_launches(count):
        def record(function):
            plain = tuple(each.clone() for each in function())
            return plain, lambda: plain

        decoder, rows = make_graph_decoder(policy(), record), [live(n, [7 + n, 9]) for n in range(count)]
        for _ in range(3):
            decoder.step(rows)
        with Launches() as launches:
            decoder.step(rows)
        return launches.count

    assert count_launches(3) == count_launches(40) <= 4


def test_conversations_that_begin_alike_are_copied_at_once(monkeypatch):
    decoder, prompt = make_graph_decoder(policy()), drawn_ids(random.Random(4), 40)
    rows = [live(n, prompt) for n in range(30)]
    decoder.step(rows)
    with Launches() as launches:
        decoder._take_in(rows)
    assert [row.cached for row in rows[1:]] == [39] * 29
    assert launches.count <= 30


def test_shaped_and_greedy_rows_are_drawn_as_elsewhere():
    def sample(decoder):
        kinds = [Sampling(), Sampling(temperature=0.0), Sampling(temperature=0.7, top_p=0.8)]
        rows = [LiveRow(str(n), [9 + n, 10], kind, uniforms(n)) for n, kind in enumerate(kinds)]
        for count in (3, 2, 1):
            run(decoder, rows[:count], {row: len(row.ids) + 4 for row in rows})
        return [row.ids for row in rows], [row.logprobs for row in rows]

    ids, logprobs = sample(make_graph_decoder(policy()))
    wanted_ids, wanted = sample(make_decoder(policy(), slots=8, deterministic=False))
    assert ids == wanted_ids
    assert [*map(list, logprobs)] == [pytest.approx(each, abs=1e-4) for each in wanted]


@pytest.mark.parametrize("fault", ["refuses", "wrong"])
def test_what_cannot_be_recorded_is_sampled_plainly_and_that_is_said_once(fault, caplog):
    def record(function):
        if fault == "refuses":
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return function(), lambda: [each * 1.5 for each in function()]

    of = policy()
    rows, until = rows_of_many_lengths(5, tokens=16)
    with caplog.at_level(logging.WARNING, "etude.engine"):
        run(make_graph_decoder(of, record), rows, until)
    assert_right(of, rows, 1e-4)
    (said,) = caplog.messages
    assert ("not permitted" if fault == "refuses" else "off by") in said
    assert "\n" not in said


def on_gpu(name):
    """The model there, in bfloat16, and the same on this CPU."""
    here, there = FUSED[name](), FUSED[name]()
    here.model.to(torch.bfloat16)
    there.device = choose_device("cuda")
    there.model.to(there.device, torch.bfloat16)
    return here, there


@needs_cuda
@pytest.mark.parametrize("name", FUSED)
def test_a_gpu_samples_what_the_model_says(name):
    here, there = on_gpu(name)
    decoder = make_decoder(there, slots=8, deterministic=False)
    assert isinstance(decoder, GraphDecoder)
    rows, until = rows_of_many_lengths(20, tokens=16)
    run(decoder, rows, until, start=17)
    assert decoder._record is not None
    assert_right(here, rows, 0.1)


@needs_cuda
def test_what_a_gpu_cannot_record_leaves_it_in_order():
    device = choose_device("cuda")
    numbers = torch.ones(4, device=device)
    with pytest.raises(RuntimeError):
        cuda_graphs(device)(lambda: (numbers * float(numbers.sum()), numbers))
    assert float((numbers + 1).sum()) == 8
    (plain, _), replay = cuda_graphs(device)(lambda: (numbers * 2, numbers))
    numbers.fill_(3.0)
    assert float(plain.sum()) == 8
    assert float(replay()[0].sum()) == 24
