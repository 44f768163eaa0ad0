"""The local adapter's config, as the learner gets it."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from etude.algorithms.algorithm import changed_options
from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.backends.local import LocalAdapterConfig
from etude.backends.local_adapter import learner_options
from etude.config.finetuning import FinetuneConfig
from etude.learner.plan import Schedule
from etude.server.hyperparameters import hyperparameters_for, job_algorithm, resolved


@pytest.mark.parametrize(
    ("run", "trainings"),
    [
        ({"num_epochs": 7}, 7),
        ({"num_epochs": 7, "fine_tune_from_scratch": True}, 1),
    ],
    ids=["of the run", "every job from the base"],
)
def test_the_learning_rate_falls_over_the_epochs(run, trainings):
    config = LocalAdapterConfig(lr_schedule="cosine", warmup_steps=2)
    found = learner_options(config, FinetuneConfig(**run)).schedule
    assert found == Schedule("cosine", 2, trainings)


def test_ipo_has_no_labels_to_smooth():
    asked = {"loss_type": "ipo", "label_smoothing": 0.1}
    with pytest.raises(ValidationError, match="label_smoothing is for the sigmoid losses"):
        Dpo(**asked)
    with pytest.raises(ValidationError, match="label_smoothing is for the sigmoid losses"):
        hyperparameters_for("dpo", **asked)


@pytest.mark.parametrize(
    "algorithm",
    [
        Dpo(reference="base"),
        Dpo(reference="base", loss_type="ipo", beta=0.3),
        Dpo(reference="base", loss_type="sigmoid_norm", label_smoothing=0.1),
        Grpo(variant="gspo"),
        Grpo(correction="mask", entropy_bonus=0.1),
    ],
    ids=range(5),
)
def test_a_job_of_the_server_has_the_same_loss(algorithm):
    method = algorithm.type_name
    options = {name: value for name, value in changed_options(algorithm).items() if name != "reference"}
    values = resolved(method, hyperparameters_for(method, **options), 4, None, fine_tuned=False)
    assert job_algorithm(method, values) == algorithm
