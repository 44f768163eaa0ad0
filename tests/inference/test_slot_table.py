"""A row gets the slot that holds most of its conversation, and takes no other conversation's without need."""

from __future__ import annotations

from etude.core.call import Sampling
from etude.inference.row import Row
from etude.inference.slot_table import SlotTable


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


def test_the_last_token_is_always_read_anew():
    table = SlotTable(kept=4, least=1)
    slot, _ = read(table, "a", 1, 2, 3)
    assert read(table, "a", 1, 2, 3) == (slot, 2)


def test_of_several_branches_the_longest_is_taken_up():
    table = SlotTable(kept=4, least=1)
    branches = [row("a", 1, 2), row("a", 1, 2, 3, 4), row("a", 1, 7)]
    for one in branches:
        table.place(one, reuse=True)
        one.cached = len(one.ids)
    for one in branches:
        table.release(one)
    assert read(table, "a", 1, 2, 3, 4, 5) == (branches[1].slot, 4)


def test_a_conversation_keeps_its_slot_until_all_are_taken_and_it_is_the_oldest():
    table = SlotTable(kept=10, least=1)
    slots = [read(table, name, 1, 2)[0] for name in "abcdefghij"]
    assert len(set(slots)) == 10
    assert read(table, "a", 1, 2, 3) == (slots[0], 2)
    for name in "uvwxyzUVWX"[: len(table) - 9]:
        read(table, name, 1, 2)
    assert read(table, "b", 1, 2, 3)[1] == 0
    assert read(table, "a", 1, 2, 3, 4)[1] == 3


def test_there_is_a_slot_for_every_row_at_once():
    table = SlotTable(kept=2, least=1)
    rows = [row(str(number), 1, 2) for number in range(50)]
    for one in rows:
        table.place(one, reuse=True)
    assert len({one.slot for one in rows}) == 50


def test_after_forgetting_nothing_counts_as_read():
    table = SlotTable(kept=4, least=1)
    read(table, "a", 1, 2, 3)
    flying = row("b", 1, 2)
    table.place(flying, reuse=True)
    flying.cached = 2
    table.forget()
    assert flying.cached == 0
    assert read(table, "a", 1, 2, 3, 4)[1] == 0


def test_a_row_that_never_got_a_slot_may_be_released():
    SlotTable(kept=2, least=1).release(row("a", 1))
