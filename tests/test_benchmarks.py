"""Benchmarks can be started, and measure what can be reckoned."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import etude
from etude.core.call import ChatRequest
from etude.core.episode import Example
from etude.models.speech import Speech
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts, beside each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(name: str):
    importlib.import_module(name)


# The simulation of many nodes


@pytest.fixture
def scale() -> ModuleType:
    return importlib.import_module("scale")


COSTS = {"call": 0.001, "episode": 0.002, "beat": 0.0, "step": 0.0001, "start": 0.0, "latency": 0.01}


def test_five_simulated_nodes_do_what_can_be_reckoned(scale: ModuleType):
    work = scale.Work(calls=4, tokens=1024, seconds=2.0, spread=0.0)
    setting = scale.Setting(5, 2, work, rounds=4.0)
    outcome = scale.simulate(setting, scale.Costs(**COSTS))
    # An episode: there and back, four answers each with its commit, and two more commits.
    commit, episodes = 2 * 0.01 + 0.001, 10 * 4
    assert outcome.waits[0] == pytest.approx(commit, abs=0.01)
    assert outcome.seconds == pytest.approx(4 * (4 * (2.0 + commit) + 3 * 2 * 0.01), rel=0.02)
    per_call = 0.001 + 0.002 / 4
    assert outcome.head == pytest.approx(outcome.calls_per_s * per_call, rel=0.25)
    assert (outcome.played_again, outcome.calls_again) == (0, 0)
    # Each runner is looked at four times a second.
    assert outcome.beats == pytest.approx(5 * 4 * outcome.seconds, rel=0.05)
    again = scale.simulate(setting, scale.Costs(**COSTS))
    assert (again.seconds, again.waits, again.head) == (outcome.seconds, outcome.waits, outcome.head)
    assert episodes == setting.rounds * setting.at_once


# Learning


@etude.evaluator
def is_even(example: Example, output: str) -> bool:
    """A reward that a model which knows nothing gets now and then."""
    return len(output) % 2 == 0


@pytest.fixture
def learning() -> ModuleType:
    return importlib.import_module("learning")


@pytest.fixture
def course(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A training on few questions, of a tiny model that knows nothing."""
    pytest.importorskip("reasoning_gym")
    task = importlib.import_module("learning_task")
    few = task.asked_config(
        "reversal", "right_order", task.questions("train", 16), task.questions("validation", 8)
    )
    few["eval"]["evaluators"] = {"right_order": "tests.test_benchmarks:is_even"}
    monkeypatch.setitem(task.TASKS, task.REVERSAL, replace(task.TASKS[task.REVERSAL], config=few, prompts=2))
    policy = build_policy(
        build_tokenizer(["Reverse this list of words: a, b, c"]), 0, TinyShape(max_context=2048)
    )
    policy.export(tmp_path / "tiny")
    return task.Course(tmp_path / "runs", task.REVERSAL, 3, 5, str(tmp_path / "tiny"))


def series(learning: ModuleType, side: str, seconds: float, rewards: list[float], seed: int = 0) -> Any:
    """Points so many seconds apart, at each of which all of four examples have the same reward."""
    points = [
        learning.Point(128 * at, seconds * at, 2 * seconds * at, [reward] * 4)
        for at, reward in enumerate(rewards)
    ]
    return learning.Series(seed, side, points)


RISING = [0.0, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_the_target_is_reached_on_the_line_between_two_points(learning: ModuleType):
    pair = learning.Pair(series(learning, "etude", 10, RISING), series(learning, "trl", 30, RISING))
    assert pair.target == pytest.approx(0.9)
    assert pair.etude.seconds_to(0.9, "cpu_seconds") == pytest.approx(18.0)
    assert pair.times_sooner("cpu_seconds") == pair.times_sooner("wall_seconds") == pytest.approx(3.0)


def test_the_model_is_measured_after_each_fifth_and_before_the_first(
    learning: ModuleType, course: Any, tmp_path: Path
):
    learning.measure("etude", course, file := tmp_path / "etude.json", time.time())
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    assert [point["episodes"] for point in points] == [0, 16, 32, 48, 64, 80]
    assert all(len(point["rewards"]) == 8 for point in points)
    assert points[0]["cpu_seconds"] == 0 < points[1]["cpu_seconds"] < points[5]["cpu_seconds"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_both_sides_have_the_same_settings_and_prompts(learning: ModuleType, course: Any):
    pytest.importorskip("trl")
    trl, task = importlib.import_module("learning_trl"), importlib.import_module("learning_task")
    given = trl.settings(course)
    assert given.per_device_train_batch_size * given.gradient_accumulation_steps == 16
    assert (given.num_generations, given.max_completion_length) == (8, 16)
    assert (given.learning_rate, given.adam_beta2, given.weight_decay) == (5e-4, 0.95, 0.0)
    assert (given.epsilon, given.epsilon_high, given.beta, given.max_grad_norm) == (0.2, 0.28, 0.0, 1.0)
    assert (given.temperature, given.lr_scheduler_type, given.seed) == (1.0, "constant", 3)
    example = Example("a", {"question": "Reverse this list of words: tea, of, cup\n"}, "cup, of, tea")
    (row,) = trl.rows([example])
    tokenizer = build_tokenizer(["Reverse this list of words: a, b, c"])
    speech: Speech = build_policy(tokenizer, 0).speech
    theirs = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    asked = task.reversal_messages(example.inputs["question"])
    assert tuple(theirs) == speech.template.prompt(ChatRequest(tuple(asked))).ids
    answers = [[{"role": "assistant", "content": text}] for text in ("cup, of, tea", "tea, of, cup")]
    assert trl.reward(answers, example=[row["example"]] * 2) == [1.0, 0.0]
    assert [one.inputs["question"] for one in course.prompts()[:2]] == [
        one.inputs["question"] for one in replace(course, steps=10).prompts()[:2]
    ]
