"""Learning-rate schedules, against those of transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.learner.plan import Schedule


def theirs(name: str, steps: int) -> list[float]:
    from transformers import get_scheduler

    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = get_scheduler(name, optimiser, num_warmup_steps=0, num_training_steps=steps)
    rates = []
    for _ in range(steps):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        schedule.step()
    return rates


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("trainings", "steps_each"), [(12, 1), (1, 12), (3, 4)])
def test_trainings_of_equal_length_have_the_rates_of_transformers(shape, trainings, steps_each):
    schedule = Schedule(shape, trainings=trainings)
    ours = [
        schedule.share(trained * steps_each + step + 1, trained, step / steps_each)
        for trained in range(trainings)
        for step in range(steps_each)
    ]
    assert ours == pytest.approx(theirs(shape, trainings * steps_each), abs=1e-12)


def test_warm_up_multiplies_what_the_rate_has_fallen_to():
    schedule = Schedule("linear", warmup_steps=4, trainings=8)
    assert [schedule.share(step, step - 1, 0.0) for step in range(1, 6)] == pytest.approx(
        [1 / 4, 2 / 4 * 7 / 8, 3 / 4 * 6 / 8, 5 / 8, 4 / 8]
    )


@given(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.integers(0, 10),
    st.integers(1, 10),
    st.integers(1, 100),
    st.integers(0, 30),
    st.floats(0, 1, exclude_max=True),
)
def test_a_rate_is_never_above_the_highest_and_is_0_at_the_end(shape, warmup, trainings, step, trained, part):
    share = Schedule(shape, warmup, trainings).share(step, trained, part)
    assert 0 <= share <= 1 + 1e-12
    if trained >= trainings and step >= warmup and shape != "constant":
        assert share == pytest.approx(0.0)
