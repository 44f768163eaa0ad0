"""What the local adapter's config means to the learner."""

from __future__ import annotations

import pytest

from etude.adapters.local_config import LocalAdapterConfig
from etude.adapters.local_training import learner_options
from etude.config.finetuning import FinetuneConfig
from etude.learner.schedule import Schedule


@pytest.mark.parametrize(
    ("adapter", "run", "trainings"),
    [
        ({}, {"num_epochs": 7}, 7),
        ({"lr_schedule_epochs": 3}, {"num_epochs": 7}, 3),
        ({}, {"num_epochs": 7, "fine_tune_from_scratch": True}, 1),
    ],
    ids=["of the run", "as asked", "every job from the base"],
)
def test_the_learning_rate_falls_over_the_epochs(adapter, run, trainings):
    config = LocalAdapterConfig(lr_schedule="cosine", warmup_steps=2, lr_floor=0.1, **adapter)
    found = learner_options(config, FinetuneConfig(**run)).schedule
    assert found == Schedule("cosine", 2, 0.1, trainings)
