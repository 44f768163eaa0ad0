"""Slots hold the keys and values of conversations of different lengths, and grow without losing any."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.inference.kv_slots import KvSlots, StepPlan, span_for
from etude.inference.slot_table import Copy


def write(kv, rows, columns, value, span=64):
    """Write one token to each row; what attention is then given."""
    kv.plan = StepPlan(
        torch.tensor(rows), torch.tensor(columns)[:, None], span, leading=rows == list(range(len(rows)))
    )
    new = torch.full((len(rows), 2, 1, 4), float(value))
    return kv.update(new, -new, 0)


def test_a_step_writes_to_its_own_columns_and_reads_its_span():
    kv = KvSlots(layers=1, slots=4)
    write(kv, [0, 1], [3, 5], 1.0)
    keys, values = write(kv, [1, 3], [6, 0], 2.0)
    assert keys.shape == (2, 2, 64, 4)
    assert keys[0, 0, :, 0].nonzero().flatten().tolist() == [5, 6]
    assert keys[1, 0, :, 0].nonzero().flatten().tolist() == [0]
    assert torch.equal(values, -keys)


def test_growing_keeps_what_is_held():
    kv = KvSlots(layers=1, slots=2)
    write(kv, [0, 1], [3, 5], 1.0)
    kv.reserve([4, 6, 0, 0, 0, 0, 0], 200)
    keys, _ = write(kv, [0, 6], [150, 199], 2.0, span=256)
    assert (kv.slots, kv.columns, kv.waste) == (7, 257, 256)
    assert keys[0, 0, :, 0].nonzero().flatten().tolist() == [3, 150]
    assert keys[1, 0, :, 0].nonzero().flatten().tolist() == [199]


def test_growing_copies_what_is_held_and_no_more():
    kv = KvSlots(layers=1, slots=2)
    write(kv, [0, 1], [3, 5], 1.0)
    kv.reserve([4, 0], 200)
    assert kv.layers[0].keys[0, 0, :, 0].nonzero().flatten().tolist() == [3]
    assert not kv.layers[0].keys[1].any()


def test_the_waste_bin_is_never_read():
    kv = KvSlots(layers=1, slots=2)
    keys, _ = write(kv, [0, 1], [kv.waste, 0], 1.0)
    assert not keys[0].any()
    kv.reserve([0, 1], 65)
    keys, _ = write(kv, [0, 1], [kv.waste, 1], 1.0, span=128)
    assert not keys[0].any()


def test_copies_are_all_read_before_any_is_written():
    kv = KvSlots(layers=1, slots=3)
    write(kv, [0, 2], [1, 2], 1.0)
    kv.copy([Copy(0, 2, 3), Copy(2, 0, 3), Copy(1, 0, 0)])
    kv.copy([])
    keys, _ = write(kv, [0, 2], [10, 10], 2.0)
    assert keys[0, 0, :, 0].nonzero().flatten().tolist() == [2, 10]
    assert keys[1, 0, :, 0].nonzero().flatten().tolist() == [1, 10]


@settings(deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(0, 6)), max_size=6))
def test_whatever_the_copies_each_gets_what_was_there_before(wanted):
    """From one slot to many, round in a circle, or to a slot that others copy from."""
    copies = [Copy(source, target, length) for source, target, length in wanted if source != target]
    kv = KvSlots(layers=1, slots=5)
    for column in range(6):
        write(kv, [0, 1, 2, 3, 4], [column] * 5, 1.0)
    held = kv.layers[0].keys
    held[:, :, :6] = torch.arange(5.0)[:, None, None, None] * 10 + torch.arange(6.0)[:, None]
    before, expected = held.clone(), held.clone()
    for copy in copies:
        expected[copy.target, :, : copy.length] = before[copy.source, :, : copy.length]
    kv.copy(copies)
    assert torch.equal(held, expected)


def test_both_ways_of_writing_come_to_the_same():
    columns = torch.tensor([[4, 5], [9, 128]])
    seen = []
    for rows in ([0, 1], [3, 1]):
        plan = StepPlan(torch.tensor(rows), columns, 64, leading=rows == [0, 1])
        new_BHTD = torch.rand(2, 2, 2, 4, generator=torch.Generator().manual_seed(0))
        plainly, quickly = KvSlots(layers=1, slots=4), KvSlots(layers=1, slots=4)
        for kv in (plainly, quickly):
            kv.reserve([0] * 4, 128)
            kv.plan = plan
        both_M2D = torch.stack([new_BHTD, -new_BHTD], dim=3).transpose(1, 2).flatten(0, 2)
        seen.append(plainly.update(new_BHTD, -new_BHTD, 0))
        layer = quickly.layers[0]
        layer.by_token(2, 4, torch.float32).index_copy_(
            0, quickly.places(2, plan.rows[:, None], columns), both_M2D
        )
        seen.append(layer.seen())
    for one in seen[1:]:
        assert all(map(torch.equal, one, seen[0]))


def test_spans_are_multiples_of_a_step():
    assert [span_for(length) for length in (0, 1, 64, 65, 500)] == [64, 64, 64, 128, 512]
