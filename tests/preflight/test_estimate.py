"""What a run would take."""

import pytest

from etude.cli.check import about
from etude.config.load import parse_config
from etude.preflight.estimate import episode_counts
from etude.preflight.sizes import ModelSize, shown_bytes
from etude.preflight.speed import Work, seconds_for


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


def test_memory_has_weights_gradient_moments_and_two_copies():
    assert size().memory == 1000 * 4 + 1000 * (3 * 4 + 8)
    assert size(trainable=0).memory == 1000 * 4
    assert size(trainable=10).version == 10 * (4 + 8)


def test_twice_the_work_takes_twice_as_long():
    pytest.importorskip("torch")
    large = size(parameters=10**9)
    once = seconds_for(large, Work(1000, 1000, 1000, 8))
    twice = seconds_for(large, Work(2000, 2000, 2000, 8))
    assert 1.2 < twice / once < 3.5, "the machine's speed is measured each time, and it may be busy"


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
