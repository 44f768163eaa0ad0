"""Evaluators from plain functions."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.config.import_path import make_importable
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.example import Example
from etude.core.interfaces import Evaluator
from etude.rewards.evaluator import (
    FunctionEvaluator,
    FunctionEvaluatorConfig,
    as_evaluator,
    evaluator,
    function_evaluator,
    scored,
)
from etude.rewards.scorer import evaluate

EXAMPLE = Example("q1", {"question": "2 + 2"}, "4")
ITEM = EvalInputItem(
    id="q1",
    generation=3,
    output_obj="4",
    full_dataset_entry=EXAMPLE,
    episode=EpisodeRecord("train/q1/3", EXAMPLE, 3, output="4"),
)


async def outcome(fn: Callable[..., Any], seconds: float = 600.0, **options: Any) -> EvalOutputItem:
    """The evaluator's result for ITEM."""
    (output,) = await evaluate(FunctionEvaluator(fn, **options), [ITEM], seconds)
    assert (output.id, output.generation) == ("q1", 3)
    return output


async def test_an_async_function_scores() -> None:
    async def correct(example: Example, output: str) -> bool:
        await asyncio.sleep(0)
        return output == example.expected

    assert (await outcome(correct)).score == 1.0


async def test_arguments_of_the_config_are_handed_over() -> None:
    def within(example: Example, output: str, tolerance: float) -> float:
        return tolerance

    assert (await outcome(within, arguments={"tolerance": 0.25})).score == 0.25


async def test_without_an_episode_the_example_is_made_of_the_item() -> None:
    item = EvalInputItem(id="x", input_obj={"n": 1}, expected_output_obj=1, output_obj=1)
    found: list[Example] = []
    await FunctionEvaluator(lambda example, output: found.append(example)).evaluate_item(item)
    assert found == [Example("x", {"n": 1}, 1)]


@pytest.mark.parametrize(
    ("result", "score", "reasoning"),
    [
        (1, 1.0, None),
        (True, 1.0, None),
        (0.25, 0.25, None),
        (Fraction(1, 4), 0.25, None),
        (Decimal("0.25"), 0.25, None),
        (numpy.bool_(True), 1.0, None),
        (numpy.float32(0.25), 0.25, None),
        (numpy.longdouble(0.25), 0.25, None),
        (numpy.int64(2), 2.0, None),
        (numpy.array(0.25), 0.25, None),
        ((numpy.array(True), numpy.float32(0.5)), 1.0, 0.5),
        (torch.tensor(0.25, requires_grad=True), 0.25, None),
        (torch.tensor(True), 1.0, None),
        (EvalOutputItem(id=1, score=numpy.bool_(True)), 1.0, None),
        (-2.5, -2.5, None),
        ((0.5, "half right"), 0.5, "half right"),
        ((0.5, {"parts": (1, 2)}), 0.5, {"parts": [1, 2]}),
        ((0.5, {"worst": math.inf}), 0.5, {"worst": "Infinity"}),
        (EvalOutputItem(id="other", score=0.5, reasoning="why"), 0.5, "why"),
    ],
)
async def test_what_counts_as_a_score(result: Any, score: float, reasoning: Any) -> None:
    output = await outcome(lambda example, output: result)
    assert (output.score, output.reasoning, output.error) == (score, reasoning, None)


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, "returned None"),
        (math.nan, "returned nan"),
        (-math.inf, "returned -inf"),
        ("0.5", "returned a str"),
        ((math.nan, "why"), "returned nan"),
        ((1, 2, 3), "returned a tuple"),
        ([0.5, "why"], "returned a list"),
        (numpy.array([0.5]), "returned an ndarray of shape (1,)"),
        (torch.tensor([1.0, 2.0]), "returned a Tensor of shape (2,)"),
        (numpy.datetime64("2026-01-01"), "returned a datetime64"),
        (numpy.complex64(1), "returned a complex64"),
        (10**400, "a score is a number"),
        (Decimal("sNaN"), "a score is a number"),
        (EvalOutputItem(id="q1", error="the sandbox is down"), "the sandbox is down"),
        (EvalOutputItem(id="q1", score=math.nan), "returned nan"),
        (1e308, "returned 1e+308; a score is a finite number within ±1e+30"),
        (10**400, "a score is a number"),
    ],
)
async def test_what_does_not_count_is_an_error_and_never_a_zero(result: Any, error: str) -> None:
    output = await outcome(lambda example, output: result)
    assert output.score is None
    assert not output.is_scored
    assert error in (output.error or "")


@given(st.recursive(st.none() | st.floats() | st.text() | st.binary(), st.lists))
def test_whatever_is_returned_is_a_finite_score_or_an_error(result: Any) -> None:
    output = scored(ITEM, (result, result))
    assert output.is_scored == (isinstance(result, float) and abs(result) <= 1e30)
    assert (output.error is None) == output.is_scored


async def test_a_wrong_score_of_an_output_item_is_told_in_one_sentence() -> None:
    output = await outcome(lambda example, output: EvalOutputItem(id="q1", score="0.5"))  # type: ignore[arg-type]
    assert "EvalOutputItem: score: Value error, a number is expected, found a str" in (output.error or "")


async def test_what_an_evaluator_changes_reaches_neither_the_record_nor_another_evaluator() -> None:
    record = EpisodeRecord("train/q1/0", Example("q1", {"n": 1}), 0, output={"answer": 4})
    item = EvalInputItem(
        id="q1",
        input_obj=record.example.inputs,
        output_obj=record.output,
        full_dataset_entry=record.example,
        episode=record,
    )

    class Careless(Evaluator):
        async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
            item.output_obj["answer"] = None
            item.input_obj["n"] = item.full_dataset_entry.inputs["n"] = None
            item.output_obj, item.id = "mine", "other"
            assert item.episode is not None
            return EvalOutputItem(id=item.id, score=float(item.episode.output["answer"] is None))

    (output,) = await evaluate(Careless(), [item], 5.0)
    assert (output.id, output.score) == ("q1", 1.0)
    assert (item.id, item.output_obj, item.input_obj) == ("q1", {"answer": 4}, {"n": 1})
    assert (record.output, record.example.inputs) == ({"answer": 4}, {"n": 1})


class Backwards(Evaluator):
    """Compares, and gives its scores in another order, with the ids as numbers."""

    def __init__(self, *generations: int) -> None:
        self.generations = generations

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        raise NotImplementedError

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        return [EvalOutputItem(id=1, generation=place, score=place / 10) for place in self.generations]  # type: ignore[arg-type]


async def test_scores_of_a_group_are_matched_by_their_generation() -> None:
    items = [EvalInputItem(id="1", generation=generation) for generation in range(3)]
    outputs = await evaluate(Backwards(2, 1, 0), items, 5.0)
    assert [(one.id, one.generation, one.score) for one in outputs] == [
        ("1", 0, 0.0),
        ("1", 1, 0.1),
        ("1", 2, 0.2),
    ]
    for wrong in (Backwards(0, 0, 1), Backwards(1, 2, 3)):
        assert all(
            "scores of the generations" in (one.error or "") for one in await evaluate(wrong, items, 5.0)
        )


async def test_a_group_that_gets_no_list_of_scores_says_what_came() -> None:
    class Nothing(Backwards):
        async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
            return None  # type: ignore[return-value]

    (output, _) = await evaluate(Nothing(), [EvalInputItem(id=1), EvalInputItem(id=1, generation=1)], 5.0)  # type: ignore[arg-type]
    assert "evaluate_group returned None; return a list" in (output.error or "")


async def test_an_exception_is_an_error_that_names_the_line() -> None:
    def broken(example: Example, output: str) -> float:
        return 1 / 0

    output = await outcome(broken)
    assert output.score is None
    line = broken.__code__.co_firstlineno + 1
    assert output.error == f"{__file__}:{line}: ZeroDivisionError: division by zero"


async def test_an_evaluator_that_takes_too_long_is_an_error() -> None:
    async def never(example: Example, output: str) -> float:
        await asyncio.Event().wait()
        return 1.0

    assert (await outcome(never, 0.01)).error == "the evaluator took longer than 0.01 s"


async def test_an_evaluators_own_timeout_error_is_not_mistaken_for_ours() -> None:
    async def times_out(example: Example, output: str) -> float:
        raise TimeoutError("the database")

    assert "TimeoutError: the database" in ((await outcome(times_out)).error or "")


async def test_a_blocking_function_that_hangs_is_an_error_and_blocks_no_other() -> None:
    release = threading.Event()

    def hangs(example: Example, output: str) -> float:
        release.wait()
        return 1.0

    try:
        output = await outcome(hangs, timeout=0.01)
        assert output.error == "the evaluator took longer than 0.01 s"
        assert (await outcome(lambda example, output: 1.0)).score == 1.0
    finally:
        release.set()


async def test_blocking_functions_run_at_the_same_time() -> None:
    together = threading.Barrier(4)

    def waits_for_the_others(example: Example, output: str) -> float:
        together.wait(10)
        return 1.0

    scorer = FunctionEvaluator(waits_for_the_others)
    outputs = await asyncio.gather(*(scorer.evaluate_item(ITEM) for _ in range(4)))
    assert [output.score for output in outputs] == [1.0] * 4


def test_a_marked_function_is_still_a_function() -> None:
    @evaluator
    def correct(example: Example, output: str) -> float:
        return float(output == example.expected)

    @evaluator(name="strict", timeout=3)
    def other(example: Example, output: str) -> float:
        return 0.0

    assert correct(EXAMPLE, "4") == 1.0
    assert FunctionEvaluator(correct).name == "correct"
    strict = FunctionEvaluator(other)
    assert (strict.name, strict.timeout) == ("strict", 3)
    assert FunctionEvaluator(other, timeout=1).timeout == 1


@pytest.mark.parametrize("fn", [lambda: 1.0, lambda example: 1.0, lambda a, b, c, d: 1.0])
def test_a_function_that_takes_something_else_is_refused_with_its_line_when_it_is_used(fn: Any) -> None:
    assert evaluator(fn) is fn
    line = rf"test_function_evaluator\.py:{fn.__code__.co_firstlineno}: the evaluator "
    with pytest.raises(RequestError, match=line + r".*takes \(example, output\) or \(example, output, ep"):
        as_evaluator(fn)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(RequestError, match="tolerence"):
        FunctionEvaluator(lambda example, output, tolerance=0: 1.0, arguments={"tolerence": 1})


def test_only_evaluators_and_functions_are_evaluators() -> None:
    known = FunctionEvaluator(lambda example, output: 1.0)
    assert as_evaluator(known) is known
    assert isinstance(as_evaluator(lambda example, output: 1.0), Evaluator)
    for other in ("correct", Evaluator):
        with pytest.raises(RequestError, match="is not an evaluator"):
            as_evaluator(other)


async def test_the_function_type_takes_functions_evaluators_and_their_classes(tmp_path: Any) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "from etude.core.interfaces import Evaluator\n"
        "from etude.rewards.evaluator import scored\n"
        "class Constant(Evaluator):\n"
        "    def __init__(self, value=2.0):\n"
        "        self.value = value\n"
        "    async def evaluate_item(self, item):\n"
        "        return scored(item, self.value)\n"
        "ready = Constant()\n"
        "def at_least(example, output, bound=0.0):\n"
        "    return bound\n"
    )
    make_importable(tmp_path)

    async def score(function: str, **arguments: Any) -> float | None:
        config = FunctionEvaluatorConfig(function=f"my_rewards:{function}", arguments=arguments)
        async for built in function_evaluator(config, None):  # type: ignore[arg-type]  # it needs no builder
            return (await built.evaluate_item(ITEM)).score
        return None

    assert await score("at_least", bound=0.5) == 0.5
    assert await score("ready") == 2.0
    assert await score("Constant", value=3.0) == 3.0


class Odd(Exception):
    """Its text cannot be had."""

    def __str__(self) -> str:
        raise ValueError("no")


async def test_an_error_whose_text_cannot_be_had_is_told_by_its_kind() -> None:
    def judge(example: Example, output: str) -> float:
        raise Odd

    assert "Odd: (its text cannot be had: ValueError)" in ((await outcome(judge)).error or "")
