"""The estimate of a run's episodes and memory."""

import pytest

from etude.config.load import parse_config
from etude.preflight.estimate import episode_counts


def config(**finetuning):
    builder = {"_type": "grpo", "num_generations": 4, "examples_per_epoch": 10}
    return parse_config({"trajectory_builders": {"grpo": builder}, "finetuning": finetuning})


@pytest.mark.parametrize(
    ("epochs", "interval", "validations"), [(1, 5, 2), (5, 5, 2), (6, 5, 3), (10, 5, 3), (3, 1, 4)]
)
def test_validations_are_before_at_intervals_and_at_the_end(epochs, interval, validations):
    settings = config(num_epochs=epochs, run_configuration={"validation_interval": interval})
    assert episode_counts(settings, 100, 7) == (epochs * 10 * 4, validations * 7)


def test_an_epoch_has_no_more_examples_than_there_are():
    assert episode_counts(config(num_epochs=2), 3, 0) == (2 * 3 * 4, 0)
