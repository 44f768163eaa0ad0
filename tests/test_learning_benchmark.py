"""The comparison of how soon models learn: both sides are given the same, and figures are put together so."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from etude.core.call import ChatRequest
from etude.demo.demo import copy_example
from etude.models.speech import Speech
from etude.models.tiny import build_policy, build_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def learning(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("learning")


def series(learning: ModuleType, side: str, seconds: float, rewards: list[float], seed: int = 0) -> Any:
    """Points so many seconds apart, at each of which all of four examples have the same reward."""
    points = [
        learning.Point(128 * at, seconds * at, 2 * seconds * at, [reward] * 4)
        for at, reward in enumerate(rewards)
    ]
    return learning.Series(seed, side, points, {"cpu_seconds": 4.0, "wall_seconds": 8.0})


RISING = [0.0, 0.5, *[1.0] * 9]


def test_the_target_is_reached_on_the_line_between_two_points(learning: ModuleType):
    pair = learning.Pair(series(learning, "etude", 10, RISING), series(learning, "trl", 30, RISING))
    assert pair.target == pytest.approx(0.9)
    assert pair.etude.seconds_to(0.9, "cpu_seconds") == pytest.approx(18.0)
    assert pair.times_sooner("cpu_seconds") == pair.times_sooner("wall_seconds") == pytest.approx(3.0)
    assert pair.times_sooner("cpu_seconds", with_start=True) == pytest.approx(58 / 22)


def test_who_never_gets_there_is_not_timed(learning: ModuleType):
    slow = series(learning, "trl", 1, [0.0, *[0.5] * 10])
    found = learning.as_json([learning.Pair(series(learning, "etude", 10, RISING), slow)])
    assert found["times_sooner_to_target"] == {
        "median": None,
        "low": None,
        "high": None,
        "n": 1,
        "by_seed": [None],
    }
    assert found["not_worse_over_seeds"] is None
    assert found["seeds"][0]["trl"]["cpu_seconds_to_target"] is None


def test_json_has_the_keys_that_others_read(learning: ModuleType):
    pairs = [
        learning.Pair(
            series(learning, "etude", 10, RISING, seed), series(learning, "trl", 30 + seed, RISING, seed)
        )
        for seed in range(3)
    ]
    found = json.loads(json.dumps(learning.as_json(pairs)))
    assert found["not_worse_at_any_tenth"] is found["not_worse_over_seeds"] is True
    assert found["times_sooner_to_target"]["median"] == pytest.approx(3.1)
    assert found["times_sooner_to_target"]["high"] == pytest.approx(3.2)
    assert [row["episodes"] for row in found["tenths"]] == [128 * at for at in range(11)]
    assert found["tenths"][1]["etude"]["n"] == 12
    assert found["tenths"][1]["difference_over_seeds"]["n"] == 3
    assert found["seeds"][2]["etude"]["points"][1]["cpu_seconds"] == 10


def test_what_is_surely_worse_at_one_tenth_is_told(learning: ModuleType):
    late = series(learning, "etude", 10, [0.0, 0.1, *[1.0] * 9])
    one = learning.Pair(late, series(learning, "trl", 30, RISING))
    found = learning.as_json([one] * 40)
    assert found["not_worse_at_any_tenth"] is found["not_worse_over_seeds"] is False


def test_series_that_are_there_are_not_measured_again(learning: ModuleType, tmp_path: Path):
    (tmp_path / "base" / "model").mkdir(parents=True)
    for side in learning.SIDES:
        one = series(learning, side, 10, RISING)
        points = [vars(point) for point in one.points]
        found = {"seed": 0, "side": side, "size": "4M", "steps": 50, "start": one.start, "points": points}
        (tmp_path / f"{side}.json").write_text(json.dumps(found), encoding="utf-8")
    there = learning.Course(tmp_path, 0, 50, "4M")
    assert learning.pair_of(there, learning.silent).trl.points[1].reward == 0.5
    for other in (replace(there, steps=20), replace(there, size="26M")):
        wanted = f"of 50 steps of the model 4M, and {other.steps} of {other.size} are to be measured: remove"
        with pytest.raises(SystemExit, match=wanted):
            learning.pair_of(other, learning.silent)


def test_a_size_is_what_it_is_called_and_both_sides_learn_at_its_rate(learning: ModuleType, tmp_path: Path):
    task = importlib.import_module("learning_task")
    tokenizer = build_tokenizer(["Sort: abcdef"], splits=["[a-z](?![a-z]*:)"])
    copy_example("sort", folder := tmp_path / "sort")
    for name, size in task.SIZES.items():
        model = build_policy(tokenizer, 0, size.shape).model
        parameters = sum(value.numel() for value in model.parameters())
        assert parameters == pytest.approx(1e6 * float(name.removesuffix("M")), rel=0.1)
        course = task.Course(folder, 0, size.steps, name)
        assert course.config.trainer_adapters["local"].learning_rate == size.learning_rate
        assert course.ends[-1] == size.steps


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_both_sides_have_the_same_settings_and_prompts(learning: ModuleType, tmp_path: Path):
    pytest.importorskip("trl")
    trl, task = importlib.import_module("learning_trl"), importlib.import_module("learning_task")
    copy_example("sort", folder := tmp_path / "sort")
    course = task.Course(folder, 3, 100)
    given = trl.settings(course, str(tmp_path))
    assert given.per_device_train_batch_size * given.gradient_accumulation_steps == 128
    assert (given.num_generations, given.max_completion_length) == (16, 12)
    assert (given.learning_rate, given.adam_beta2, given.weight_decay) == (5e-4, 0.95, 0.0)
    assert (given.epsilon, given.epsilon_high, given.beta, given.max_grad_norm) == (0.2, 0.28, 0.0, 1.0)
    assert (given.temperature, given.lr_scheduler_type, given.seed) == (1.0, "constant", 3)
    example = task.Example("a", {"letters": "cab"}, "abc")
    (row,) = trl.rows([example])
    tokenizer = build_tokenizer(["Sort: abcdef"])
    speech: Speech = build_policy(tokenizer, 0).speech
    theirs = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    assert tuple(theirs) == speech.template.prompt(ChatRequest(tuple(row["prompt"]))).ids
    score = lambda one, answer: float(answer == one.expected)  # noqa: E731
    answers = [[{"role": "assistant", "content": text}] for text in ("abc", "cab")]
    assert trl.reward_of(score)(answers, example=[row["example"]] * 2) == [1.0, 0.0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_both_sides_learn(learning: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    pytest.importorskip("trl")
    learning.main(["--seeds", "0", "--steps", "10", "--out", str(tmp_path), "--json"])
    found = json.loads(capfd.readouterr().out)
    first, *_, last = found["tenths"]
    assert first["difference"]["mean"] == 0.0 and first["etude"]["n"] == 512
    assert last["etude"]["low"] > first["etude"]["high"]
    assert last["trl"]["low"] > first["trl"]["high"]
