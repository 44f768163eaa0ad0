"""Benchmarks can be started, and measure what can be reckoned."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import etude
from etude.core.call import ChatRequest
from etude.core.episode import Example
from etude.models.text_codec import TextCodec
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts, beside each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_benchmark_can_be_imported(name: str):
    importlib.import_module(name)


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
    speech: TextCodec = build_policy(tokenizer, 0).speech
    theirs = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
    asked = task.reversal_messages(example.inputs["question"])
    assert tuple(theirs) == speech.template.prompt(ChatRequest(tuple(asked))).ids
    answers = [[{"role": "assistant", "content": text}] for text in ("cup, of, tea", "tea, of, cup")]
    assert trl.reward(answers, example=[row["example"]] * 2) == [1.0, 0.0]
    assert [one.inputs["question"] for one in course.prompts()[:2]] == [
        one.inputs["question"] for one in replace(course, steps=10).prompts()[:2]
    ]
