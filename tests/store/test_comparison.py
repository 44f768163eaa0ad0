"""Runs side by side."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from etude.store.facts import differing_settings, paired_differences, stored_scores
from tests.view.stored import Told, store_run

SETTINGS = """
eval: {evaluators: {right: {_type: function, function: "a:b"}}}
finetuning: {reward_function: {name: right}, num_epochs: %d, output_dir: %s}
"""


def run_with(
    root: Path,
    name: str,
    phases: dict[str, dict[str, list[float | None]]],
    epochs: int = 1,
    asked: Mapping[str, str] = MappingProxyType({}),
) -> Path:
    """A run with the scores of each phase's episodes by example. Its question is in `asked`, or its id."""
    episodes = []
    for phase, examples in phases.items():
        for id, scores in examples.items():
            for generation, score in enumerate(scores):
                stored = {"score": score, "reasoning": None, "error": None if score is not None else "no"}
                key = f"{phase}/{id}/{generation}"
                episodes.append(Told(key, asked=asked.get(id, id), scores={"right": stored}))
    return store_run(root, name, episodes, config=SETTINGS % (epochs, root / name))


def read_scores(run: Path) -> dict[str, list[float]]:
    """The scores of each example."""
    return {id: [each["score"] for each in own] for (id, _), own in stored_scores(run)["right"].items()}


def test_the_difference_is_paired_by_example(tmp_path):
    """Examples of very different difficulty, and the same gain on each: there is a difference."""
    rewards = {str(n): n / 20 for n in range(18)}
    first = run_with(tmp_path, "a", {"eval": {name: [one] for name, one in rewards.items()}})
    higher = {name: [one, one + 0.2] for name, one in rewards.items()}
    found = paired_differences(first, run_with(tmp_path, "b", {"eval": higher}))["right"]
    assert found.mean == pytest.approx(0.1)
    assert 0 < found.low < 0.1 < found.high
    assert found.n == 18


NOUGHTS, ONES = ({"eval": {name: [score] for name in "abcd"}} for score in (0.0, 1.0))


def test_only_examples_that_both_have_count_and_one_id_with_other_inputs_is_another_example(tmp_path):
    other = {name: f"another {name}" for name in "abcd"}
    first = run_with(tmp_path, "a", NOUGHTS)
    assert paired_differences(first, run_with(tmp_path, "b", ONES, asked=other)) == {}
    third = run_with(tmp_path, "c", ONES, asked={"d": "another question"})
    assert paired_differences(first, third)["right"].n == 3


def test_the_latest_validation_is_what_a_training_run_is_measured_by(tmp_path):
    phases = {"validation/0": {"a": [0.0]}, "validation/10": {"a": [1.0]}, "validation/9": {"a": [0.5]}}
    run = run_with(tmp_path, "a", {**phases, "train/4": {"a": [0.2]}})
    assert read_scores(run) == {"a": [1.0]}


def test_failures_are_left_out(tmp_path):
    run = run_with(tmp_path, "a", {"eval": {"a": [0.0, 1.0, None], "b": [None]}})
    assert read_scores(run) == {"a": [0.0, 1.0]}


def test_settings_that_differ(tmp_path):
    runs = [run_with(tmp_path, name, {}, epochs) for name, epochs in (("a", 1), ("b", 5), ("c", 1))]
    assert differing_settings(runs) == {"finetuning.num_epochs": [1, 5, 1]}
