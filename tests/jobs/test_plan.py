"""The steps of a training."""

from __future__ import annotations

from etude.learner.optimiser import plan_steps


def rows_of(steps):
    return [step.rows for step in steps]


def test_every_pass_goes_over_all_rows_in_an_order_of_its_own():
    steps = plan_steps([True] * 7, 2, 3, 5, "epoch")
    assert [len(step.rows) for step in steps] == [3, 3, 1] * 2
    passes = [[row for step in steps if step.epoch == epoch for row in step.rows] for epoch in (1, 2)]
    assert [sorted(rows) for rows in passes] == [list(range(7))] * 2
    assert passes[0] != passes[1]
    assert rows_of(steps) == rows_of(plan_steps([True] * 7, 2, 3, 5, "epoch"))
    assert rows_of(steps) != rows_of(plan_steps([True] * 7, 2, 3, 6, "epoch"))
    assert rows_of(steps) != rows_of(plan_steps([True] * 7, 2, 3, 5, "another job"))


def test_steps_know_where_they_are():
    steps = plan_steps([True] * 4, 2, 2, 0)
    assert [(step.number, step.of, step.epoch, step.ends_epoch, step.part) for step in steps] == [
        (1, 4, 1, False, 0.0),
        (2, 4, 1, True, 0.25),
        (3, 4, 2, False, 0.5),
        (4, 4, 2, True, 0.75),
    ]


def test_without_a_batch_size_all_rows_are_one_step_in_their_order():
    assert rows_of(plan_steps([True] * 3, 2, None, 0)) == [(0, 1, 2)] * 2


def test_steps_without_anything_to_learn_are_left_out():
    steps = plan_steps([True, False, False, False], 3, 1, 0)
    assert rows_of(steps) == [(0,)] * 3
    assert [(step.epoch, step.ends_epoch, step.of) for step in steps] == [(n, True, 3) for n in (1, 2, 3)]
    assert plan_steps([False], 1, None, 0) == []
