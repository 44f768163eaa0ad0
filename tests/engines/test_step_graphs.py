"""Steps that were recorded sample what plain ones do, for as long as what they read is where it was.

On a CPU a recording is a list of operations on the same memory; on a GPU it is a CUDA graph.
"""

from __future__ import annotations

import logging

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from etude.engines import slot_decoder
from etude.engines.decoder import make_decoder
from etude.engines.slot_decoder import SlotDecoder, StepGraphs, cuda_graphs
from etude.models.device import choose_device
from tests.engines.test_decoder import IN_SLOTS, assert_right, live, rows_of_many_lengths, run
from tests.models.tiny_models import family, policy
from tests.support import one_quick

FAMILIES = IN_SLOTS | {"mixtral": lambda: family("MixtralConfig", num_local_experts=4, num_experts_per_tok=2)}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture(autouse=True)
def not_fused(monkeypatch):
    """The models' own modules, as on a GPU."""
    monkeypatch.setattr(slot_decoder, "can_fuse", lambda model: False)


class Recorder:
    """Operations in a row, each on the tensors that it had."""

    def __init__(self):
        self.recorded = self.replayed = 0

    def __call__(self, function):
        self.recorded += 1
        plain = function().clone()
        replay = make_fx(function, pre_dispatch=False)()

        def counted():
            self.replayed += 1
            return replay()

        return plain, counted


def make_slot_decoder(of, record, slots=8):
    return SlotDecoder(of, slots=slots, deterministic=False, record=record)


@pytest.mark.parametrize("name", one_quick("llama", *sorted(FAMILIES.keys() - {"llama"})))
def test_replayed_steps_give_the_models_own_logprobs(name):
    of, record = FAMILIES[name](), Recorder()
    rows, until = rows_of_many_lengths(4, tokens=40)
    run(make_slot_decoder(of, record), rows, until, start=3)
    assert record.replayed > 2 * record.recorded
    assert_right(of, rows, 1e-4)


@pytest.mark.slow
def test_rows_and_spans_are_filled_up_to_a_few_shapes():
    of, record = policy(max_context=4096), Recorder()
    decoder = make_slot_decoder(of, record, slots=40)
    rows = [live(n, [7 + n, 9]) for n in range(40)]
    run(decoder, rows, {row: 4 + index for index, row in enumerate(rows)})
    assert record.recorded <= 12
    graphs = StepGraphs(lambda numbers, span: numbers, record, decoder._kv, [])
    shapes = [graphs.shape(rows, length) for rows, length in [(1, 1), (33, 256), (17, 257), (4, 5000)]]
    assert shapes == [(1, 256), (48, 256), (24, 512), (4, 5120)]
    assert all(graphs.shape(1, length)[1] >= length for length in range(1, 4096))


def test_new_weights_are_sampled_from_in_the_same_memory_and_elsewhere():
    of, record = policy().twin(), Recorder()
    decoder, row = make_slot_decoder(of, record), live(0, [9, 10])
    run(decoder, [row], {row: 12})
    recorded = record.recorded
    for elsewhere in (False, True):
        with torch.no_grad():
            for weight in of.model.parameters():
                weight.data = weight.data.clone() if elsewhere else weight.data
                weight.mul_(1.3)
        decoder.forget()
        row = live(1, [9, 10])
        run(decoder, [row], {row: 12})
        assert_right(of, [row], 1e-4)
        assert (record.recorded > recorded) == elsewhere


@pytest.mark.parametrize("fault", ["refuses", "wrong"])
def test_what_cannot_be_recorded_is_sampled_plainly_and_that_is_said_once(fault, caplog):
    def record(function):
        if fault == "refuses":
            raise RuntimeError("operation not permitted when stream is capturing\nmore of it")
        return function(), lambda: function() * 1.5

    of = policy()
    rows, until = rows_of_many_lengths(5, tokens=16)
    with caplog.at_level(logging.WARNING, "etude.engine"):
        run(make_slot_decoder(of, record), rows, until)
    assert_right(of, rows)
    (said,) = caplog.messages
    assert ("not permitted" if fault == "refuses" else "off by") in said
    assert "\n" not in said


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_samples_what_its_plain_steps_do(dtype):
    def sampled(record):
        of = family("Qwen2Config")
        of.device = choose_device("cuda")
        of.model.to(of.device, dtype)
        decoder = make_decoder(of, slots=8, deterministic=False)
        assert decoder._graphs is not None
        if not record:
            decoder._graphs = None
        rows, until = rows_of_many_lengths(20, tokens=16)
        run(decoder, rows, until, start=17)
        return [row.logprobs[0] for row in rows], [row.ids for row in rows], decoder

    found, ids, decoder = sampled(record=True)
    wanted, plain_ids, _ = sampled(record=False)
    assert decoder._graphs._graphs
    assert found == pytest.approx(wanted, abs=1e-4 if dtype == torch.float32 else 5e-2)
    if dtype == torch.float32:
        assert ids == plain_ids


@needs_cuda
def test_what_a_gpu_cannot_record_leaves_it_in_order():
    device = choose_device("cuda")
    numbers = torch.ones(4, device=device)
    with pytest.raises(RuntimeError):
        cuda_graphs(device)(lambda: numbers * float(numbers.sum()))
    assert float((numbers + 1).sum()) == 8
    plain, replay = cuda_graphs(device)(lambda: numbers * 2)
    numbers.fill_(3.0)
    assert float(plain.sum()) == 8
    assert float(replay().sum()) == 24
