"""What the local adapter's config means to the learner."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from etude.backends.local_adapter import learner_options
from etude.backends.local_config import LocalAdapterConfig
from etude.config.finetuning import FinetuneConfig
from etude.jobs.units import objective_of
from etude.learner.schedule import Schedule
from etude.server.hyperparameters import DpoHyperparameters, GrpoHyperparameters, resolved


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


def test_ipo_has_no_labels_to_smooth():
    with pytest.raises(ValidationError, match="label_smoothing is for the sigmoid losses"):
        LocalAdapterConfig(dpo={"loss": "ipo", "label_smoothing": 0.1})
    with pytest.raises(ValidationError, match="label_smoothing is for the sigmoid losses"):
        DpoHyperparameters(loss="ipo", label_smoothing=0.1)


def test_a_job_of_the_server_has_the_same_objectives():
    for asked in ({}, {"loss": "ipo", "beta": 0.3}, {"loss": "sigmoid_norm", "label_smoothing": 0.1}):
        values = resolved("dpo", DpoHyperparameters(**asked), 4, None, fine_tuned=False)
        config = LocalAdapterConfig(dpo={**asked, "reference": "base"})
        assert objective_of("dpo", values) == objective_of("dpo", config.options_of("dpo"))
    for asked in ({"variant": "gspo"}, {"correction": "mask", "entropy_bonus": 0.1, "off_policy_limit": 1.0}):
        values = resolved("grpo", GrpoHyperparameters(**asked), 4, None, fine_tuned=False)
        config = LocalAdapterConfig(grpo=asked)
        assert objective_of("grpo", values) == objective_of("grpo", config.options_of("grpo"))
