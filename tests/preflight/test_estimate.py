"""The estimate of a run's time and memory."""

import pytest

from etude.cli.check import about
from etude.config.load import parse_config
from etude.models.memory import shown_bytes
from etude.preflight.estimate import episode_counts
from etude.preflight.machine import ModelSize, seconds_for


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


def size(**changes):
    values = {
        "parameters": 1000,
        "trainable": 1000,
        "layers": 2,
        "bytes_per_parameter": 4,
        "device": "cpu",
        "prompt_tokens": 10.0,
    }
    return ModelSize(**(values | changes))


def test_a_version_has_the_trained_weights_moments_and_masters():
    assert size(trainable=10).version == 10 * (4 + 8)
    assert size(bytes_per_parameter=2).version == 1000 * (2 + 4 + 8)


def test_time_is_steps_and_operations(monkeypatch):
    """A machine of 1e12 operations a second, of which a model gets 0.35e12."""
    monkeypatch.setattr("etude.preflight.machine._operations_per_second", lambda device: 1e12)
    found = seconds_for(size(parameters=10**9), prompt=7000, sampled=800, trained=3500, batch=8)
    steps = 100 * (2 * 2.5e-3 + max(2 * 10**9 * 8 / 0.35e12, 4 * 10**9 / 1e10))
    prompts, training = 2 * 10**9 * 7000 / 0.35e12, 6 * 10**9 * 3500 / 0.35e12
    assert found == pytest.approx(steps + prompts + training)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e7, "25 MB"), (3e12, "3.0 TB")]
)
def test_bytes_in_words(count, text):
    assert shown_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "a second"), (90, "90 seconds"), (600, "10 minutes"), (7300, "2 hours"), (400000, "5 days")],
)
def test_durations_in_words(seconds, text):
    assert about(seconds) == text
