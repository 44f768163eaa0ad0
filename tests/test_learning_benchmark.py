"""The benchmark of learning: both sides are given the same, and figures are put together so."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import etude
from etude.core.call import ChatRequest
from etude.core.example import Example
from etude.models.speech import Speech
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@etude.evaluator
def is_even(example: Example, output: str) -> bool:
    """A reward that a model which knows nothing gets now and then."""
    return len(output) % 2 == 0


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("learning")


@pytest.fixture
def task(learning: ModuleType) -> ModuleType:
    return importlib.import_module("learning_task")


@pytest.fixture
def course(task: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A training on few questions, of a tiny model that knows nothing."""
    pytest.importorskip("reasoning_gym")
    few = task.asked_config(
        "reversal", "right_order", task.questions("train", 16), task.questions("validation", 8)
    )
    few["eval"]["evaluators"] = {"right_order": "tests.test_learning_benchmark:is_even"}
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


def test_who_never_gets_there_is_not_timed(learning: ModuleType):
    slow = series(learning, "trl", 1, [0.0, *[0.5] * 5])
    found = learning.beside_trl([learning.Pair(series(learning, "etude", 10, RISING), slow)])
    assert found["times_sooner_to_target"] == {
        "median": None,
        "low": None,
        "high": None,
        "n": 1,
        "by_seed": [None],
    }
    assert found["not_worse_over_seeds"] is None


def test_json_has_the_keys_that_others_read(learning: ModuleType):
    pairs = [
        learning.Pair(
            series(learning, "etude", 10, RISING, seed), series(learning, "trl", 30 + seed, RISING, seed)
        )
        for seed in range(3)
    ]
    found = json.loads(json.dumps(learning.beside_trl(pairs)))
    assert found["not_worse_at_any_part"] is found["not_worse_over_seeds"] is True
    assert found["times_sooner_to_target"]["median"] == pytest.approx(3.1)
    assert found["times_sooner_to_target"]["high"] == pytest.approx(3.2)
    assert [row["episodes"] for row in found["parts"]] == [128 * at for at in range(6)]
    assert found["parts"][1]["etude"]["n"] == 12
    assert found["parts"][1]["difference_over_seeds"]["n"] == 3
    assert found["seeds"][2]["etude"]["points"][1]["cpu_seconds"] == 10
    task = json.loads(json.dumps(learning.task_as_json([pair.etude for pair in pairs])))
    assert (task["before"]["mean"], task["after"]["mean"], task["after"]["n"]) == (0.0, 1.0, 12)
    assert [row["seed"] for row in task["seeds"]] == [0, 1, 2]


def test_what_is_surely_worse_at_one_part_is_told(learning: ModuleType):
    late = series(learning, "etude", 10, [0.0, 0.1, *[1.0] * 4])
    one = learning.Pair(late, series(learning, "trl", 30, RISING))
    found = learning.beside_trl([one] * 40)
    assert found["not_worse_at_any_part"] is found["not_worse_over_seeds"] is False


def test_series_that_are_there_are_not_measured_again(learning: ModuleType, tmp_path: Path):
    there = learning.Course(tmp_path, learning.REVERSAL, 0, 20)
    for side in learning.SIDES:
        points = [asdict(point) for point in series(learning, side, 10, RISING).points]
        found = {"asked": asdict(there) | {"folder": None}, "points": points}
        (tmp_path / f"word_sequence_reversal-0-{side}.json").write_text(json.dumps(found), encoding="utf-8")
    assert learning.series_of("trl", there, learning.silent).points[1].reward == 0.5
    for other in (replace(there, steps=10), replace(there, model="another")):
        with pytest.raises(SystemExit, match="is of another training: remove it"):
            learning.series_of("trl", other, learning.silent)


def test_a_query_is_right_by_what_it_finds_and_changes_nothing(
    task: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    rows = [("Peru", "Lima", "South America", 9, 9, "Sol"), ("Chad", "N'Djamena", "Africa", 1, 9, "Franc")]
    monkeypatch.setattr(task, "countries", lambda: rows)
    task.database.cache_clear()
    right = "SELECT name FROM country WHERE continent = 'Africa'"
    example = Example("q", {"question": "Which countries are in Africa?"}, right)
    assert task.right_rows(example, "select name from country where area < 5")
    for wrong in ("SELECT name FROM country", "DROP TABLE country", "DELETE FROM country", "Chad", ""):
        assert not task.right_rows(example, wrong)
    assert task.right_rows(example, right)
    task.database.cache_clear()


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_trains_and_is_measured_as_etude_is(learning: ModuleType, course: Any, tmp_path: Path):
    pytest.importorskip("trl")
    learning.measure("trl", course, file := tmp_path / "trl.json", time.time())
    points = json.loads(file.read_text(encoding="utf-8"))["points"]
    assert [point["episodes"] for point in points] == [0, 16, 32, 48, 64, 80]
    assert all(len(point["rewards"]) == 8 for point in points)
