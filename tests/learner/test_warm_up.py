"""Imitation: which transcripts it takes in which order, and what ends it."""

from __future__ import annotations

import asyncio

import pytest

from etude.core.errors import TrainingError
from etude.core.keys import generator
from etude.learner.learner import LearnerOptions
from etude.learner.warm_up import Stage, warm_up
from tests.models.tiny_models import fresh_policy, said, user

TALKS = [[user(f"what is {number} plus 1?"), said(f"it is {number + 1}.")] for number in range(9)]


class Counted(list):
    """Transcripts that know which of them were looked at."""

    def __init__(self, talks):
        super().__init__(talks)
        self.seen = []

    def __getitem__(self, number):
        self.seen.append(number)
        return super().__getitem__(number)


def stage(talks, **changes):
    options = LearnerOptions(learning_rate=1e-3)
    return Stage("talking", talks, **{"options": options, "batch_size": 2, "check_interval": 2, **changes})


def run(policy, one):
    told = []
    reports = asyncio.run(warm_up(policy, [one], seed=5, on_check=lambda name, value: told.append(value)))
    return reports[0], told


def test_transcripts_are_rendered_in_shuffled_order_when_their_turn_comes():
    talks = Counted(TALKS)
    report, told = run(fresh_policy(), stage(talks, at_most=100.0))
    order = list(range(len(TALKS)))
    generator(5, "warm-up", 0).shuffle(order)
    assert talks.seen == order[:4]
    assert (report.steps, told) == (2, [report.value])


def test_each_transcript_is_rendered_once_however_often_it_is_imitated():
    talks = Counted(TALKS)
    with pytest.raises(TrainingError, match="after 20 steps the loss is"):
        run(fresh_policy(), stage(talks, at_most=0.0, max_steps=20))
    assert sorted(talks.seen) == list(range(len(TALKS)))


def test_a_stage_is_over_when_what_is_measured_lies_between_its_bounds():
    values = iter([0.1, 0.9, 0.5, 0.5])

    async def measure():
        return next(values)

    report, told = run(fresh_policy(), stage(TALKS, measure=measure, at_least=0.4, at_most=0.6))
    assert told == [0.1, 0.9, 0.5]
    assert (report.steps, report.value) == (6, 0.5)


def test_nothing_is_measured_before_the_first_check():
    report, told = run(fresh_policy(), stage(TALKS, at_most=100.0, first_check=5))
    assert (report.steps, told) == (6, [report.value])


def test_the_same_seed_makes_the_same_weights():
    policies = [fresh_policy(), fresh_policy()]
    for policy in policies:
        run(policy, stage(TALKS, at_most=100.0))
    assert policies[0].digest() == policies[1].digest() != fresh_policy().digest()
