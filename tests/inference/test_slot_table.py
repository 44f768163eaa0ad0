"""A row gets the slot that holds most of its conversation, and takes no other conversation's without need."""

from __future__ import annotations

from etude.core.call import Sampling
from etude.inference.sampler import Row
from etude.inference.slot_table import Copy, SlotTable

LONG = list(range(100, 200))
"""A prompt that is worth sharing."""


def row(conversation, *ids):
    return Row(conversation, list(ids), Sampling(), iter(()))


def read(table, conversation, *ids, reuse=True):
    """Place a row, read it whole, and release it."""
    one = row(conversation, *ids)
    table.place(one, reuse=reuse)
    shared, one.cached = one.cached, len(ids)
    table.release(one)
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


def placed(table, conversation, *ids):
    one = row(conversation, *ids)
    table.place(one, reuse=True)
    return one


def test_samples_of_one_prompt_wait_for_the_first_and_copy_what_it_has_read():
    table = SlotTable(kept=8, least=1)
    rows = [placed(table, str(number), *LONG) for number in range(3)]
    assert [table.waits(one) for one in rows] == [False, True, True]
    assert table.copies() == []
    rows[0].cached = 64
    assert table.copies() == []
    rows[0].cached = 100
    assert table.copies() == [Copy(rows[0].slot, one.slot, 99) for one in rows[1:]]
    assert [one.cached for one in rows] == [100, 99, 99]
    assert not any(map(table.waits, rows))


def test_a_slot_that_has_moved_or_was_taken_is_not_mistaken_for_what_it_held():
    table = SlotTable(kept=2, least=1)
    first = placed(table, "a", *LONG)
    table.swap(first.slot, 1 - first.slot)
    second = placed(table, "b", *LONG)
    first.cached = 100
    assert table.copies() == [Copy(first.slot, second.slot, 99)]
    for one in (first, second):
        table.release(one)
    others = [placed(table, name, 1, 2) for name in "cd"]
    assert {one.slot for one in others} == {0, 1}
    assert not table.waits(placed(table, "e", *LONG))
    assert table.copies() == []


def tokens_read(table, prompts, *, beside=16):
    """How many are read by rows with these prompts, each of them in flight until 16 later ones have come."""
    count, flying = 0, []
    for number, prompt in enumerate(prompts):
        one = placed(table, f"{id(prompts)} {number}", *prompt)
        flying.append(one)
        table.copies()
        count += len(one.ids) - one.cached
        one.cached = len(one.ids)
        if len(flying) == beside:
            table.release(flying.pop(0))
    for one in flying:
        table.release(one)
    return count


def test_what_many_begin_with_is_read_once_over_all_phases_with_the_same_weights():
    """Agents with system prompts of 500 tokens, 200 examples each, and others in between."""
    table = SlotTable(kept=64, least=1)
    systems = [[1000 * agent + place for place in range(500)] for agent in range(3)]
    examples = [[*systems[number % 3], *range(9000 + number, 9050 + number)] for number in range(600)]
    strangers = [[*range(20000 + 200 * number, 20100 + 200 * number)] for number in range(100)]
    assert tokens_read(table, examples) == 3 * 500 + 600 * 50
    assert tokens_read(table, strangers) == 100 * 100
    assert tokens_read(table, list(examples)) <= 600 * 50
    table.forget()
    assert tokens_read(table, list(examples)) == 3 * 500 + 600 * 50
