"""Evaluators from plain functions: whatever one raises is the reason why there is no score."""

import asyncio
import contextlib
import math
import re
import threading
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from etude.config.import_path import make_importable
from etude.core import threads
from etude.core.episode import EpisodeRecord, Example
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.core.interfaces import Evaluator
from etude.rollout.evaluator import (
    FunctionEvaluator,
    FunctionEvaluatorConfig,
    as_evaluator,
    evaluate,
    evaluator,
    function_evaluator,
)

EXAMPLE = Example("q1", {"question": "2 + 2"}, "4")
ITEM = EvalInputItem(
    id="q1",
    generation=3,
    output_obj="4",
    full_dataset_entry=EXAMPLE,
    episode=EpisodeRecord("train/q1/3", EXAMPLE, 3, output="4"),
)


async def outcome(fn: Callable[..., Any], seconds: float = 600.0) -> EvalOutputItem:
    """The evaluator's result for ITEM."""
    (output,) = await evaluate(FunctionEvaluator(fn), [ITEM], seconds)
    assert (output.id, output.generation) == ("q1", 3)
    return output


@pytest.mark.parametrize(
    ("result", "score", "reasoning"),
    [
        (1, 1.0, None),
        (0.25, 0.25, None),
        (Fraction(1, 4), 0.25, None),
        (Decimal("0.25"), 0.25, None),
        (numpy.float32(0.25), 0.25, None),
        (numpy.array(0.25), 0.25, None),
        ((numpy.array(True), numpy.float32(0.5)), 1.0, 0.5),
        (torch.tensor(0.25, requires_grad=True), 0.25, None),
        ((0.5, "half right"), 0.5, "half right"),
        ((0.5, {"worst": math.inf}), 0.5, {"worst": "Infinity"}),
        (EvalOutputItem(id="other", score=0.5, reasoning="why"), 0.5, "why"),
    ],
)
async def test_what_counts_as_a_score(result: Any, score: float, reasoning: Any) -> None:
    output = await outcome(lambda example, output: result)
    assert (output.score, output.reasoning, output.error) == (score, reasoning, None)


def test_a_marked_function_is_still_a_function_and_a_partial_keeps_what_was_declared() -> None:
    @evaluator(name="share", timeout=2, bounds=(0, 10))
    def grade(example: Example, output: str, weight: float) -> float:
        return weight

    assert grade(EXAMPLE, "4", 0.5) == 0.5
    found = FunctionEvaluator(partial(partial(grade), weight=3.0))
    assert (found.name, found.timeout, found.bounds) == ("share", 2, (0, 10))


@pytest.mark.parametrize(
    ("result", "error"),
    [
        (None, "found None"),
        (math.nan, "returned nan"),
        ("0.5", "found a str"),
        ((1, 2, 3), "found a tuple"),
        (numpy.array([0.5]), r"found an ndarray .*\(1,\)"),
        (numpy.datetime64("2026-01-01"), "found a datetime64"),
        (EvalOutputItem(id="q1", error="no sandbox"), "no sandbox"),
        (EvalOutputItem(id="q1", score=math.nan), "returned nan"),
        (1e308, r"returned 1e\+308; .* ±1e\+30"),
        (10**400, "found an int: .* too large"),
    ],
)
async def test_what_does_not_count_is_an_error_and_never_a_zero(result: Any, error: str) -> None:
    output = await outcome(lambda example, output: result)
    assert output.score is None
    assert not output.is_scored
    assert re.search(error, output.error or "")


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
            return EvalOutputItem(id=item.id, score=float(item.episode.output["answer"] is None))

    (output,) = await evaluate(Careless(), [item], 5.0)
    assert (output.id, output.score) == ("q1", 1.0)
    assert (item.id, item.output_obj, item.input_obj) == ("q1", {"answer": 4}, {"n": 1})
    assert (record.output, record.example.inputs) == ({"answer": 4}, {"n": 1})


class Ordered(Evaluator):
    """Compares, and gives the scores of these generations, with the ids as numbers."""

    def __init__(self, *generations: int) -> None:
        self.generations = generations

    async def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:
        raise NotImplementedError

    async def evaluate_group(self, items: Sequence[EvalInputItem]) -> list[EvalOutputItem]:
        return [EvalOutputItem(id=1, generation=place, score=place / 10) for place in self.generations]  # type: ignore[arg-type]


async def test_scores_of_a_group_are_in_the_order_of_its_episodes() -> None:
    items = [EvalInputItem(id="1", generation=generation) for generation in range(3)]
    outputs = await evaluate(Ordered(0, 1, 2), items, 5.0)
    assert [(one.id, one.generation, one.score) for one in outputs] == [
        ("1", 0, 0.0),
        ("1", 1, 0.1),
        ("1", 2, 0.2),
    ]
    outputs = await evaluate(Ordered(0, 2, 1), items, 5.0)
    assert all("generation 2 instead of 1" in (one.error or "") for one in outputs)


async def test_an_evaluator_may_be_written_with_def() -> None:
    class Plain(Evaluator):
        def evaluate_item(self, item: EvalInputItem) -> EvalOutputItem:  # type: ignore[override]
            return EvalOutputItem(id=item.id, score=0.5)

    (output,) = await evaluate(Plain(), [EvalInputItem(id="1")], 5.0)
    assert output.score == 0.5


async def test_an_exception_is_an_error_that_names_the_line() -> None:
    def fail(example: Example, output: str) -> float:
        raise ValueError("half \ud83d")

    output = await outcome(fail)
    assert output.score is None
    line = fail.__code__.co_firstlineno + 1
    assert output.error == rf"{__file__}:{line}: ValueError: half \ud83d", "it can be printed"


async def test_a_blocking_function_that_hangs_is_an_error_and_blocks_no_other() -> None:
    release = threading.Event()

    def hangs(example: Example, output: str) -> float:
        release.wait()
        return 1.0

    try:
        assert str((await outcome(evaluator(timeout=0.01)(hangs))).error).endswith(" 0.01 s")
        assert (await outcome(lambda example, output: 1.0)).score == 1.0
    finally:
        release.set()


async def test_an_evaluator_that_does_not_stop_at_its_timeout_is_left_behind(monkeypatch: Any) -> None:
    monkeypatch.setattr(threads, "GRACE_SECONDS", 0.05)
    release = asyncio.Event()

    async def goes_on(example: Example, output: str) -> float:
        while not release.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await release.wait()
        return 1.0

    assert str((await outcome(goes_on, seconds=0.05)).error).endswith(" 0.05 s")
    release.set()


@pytest.mark.parametrize(
    "fn",
    [
        lambda output, example: (1.0, [output, example.id]),
        lambda episode, output, example: (1.0, [episode.output, example.id]),
    ],
)
async def test_parameters_in_another_order_get_the_values_of_their_names(fn: Any) -> None:
    assert (await outcome(fn)).reasoning == ["4", "q1"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda: 1.0,
        lambda example: 1.0,
        lambda a, b, c, d: 1.0,
        lambda output, expected: 1.0,
        lambda text, example: 1.0,
    ],
)
def test_a_function_that_takes_something_else_is_refused_with_its_line_when_it_is_used(fn: Any) -> None:
    assert evaluator(fn) is fn
    line = rf"test_function_evaluator\.py:{fn.__code__.co_firstlineno}: the evaluator "
    with pytest.raises(RequestError, match=line + r".*\(example, output\) .*\(example, output, ep"):
        as_evaluator(fn)


async def test_the_function_type_takes_functions_evaluators_and_their_classes(tmp_path: Any) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "from etude.core.interfaces import Evaluator\n"
        "from etude.rollout.evaluator import make_score\n"
        "class Constant(Evaluator):\n"
        "    def __init__(self, value=2.0):\n"
        "        self.value = value\n"
        "    async def evaluate_item(self, item):\n"
        "        return make_score(item, self.value)\n"
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


class Strange(BaseException):
    """No Exception."""


ERRORS = [GeneratorExit(), Strange("no"), asyncio.CancelledError(), SystemExit(0), KeyboardInterrupt()]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("waits", [False, True], ids=["in a thread", "on the loop"])
async def test_it_raises_what_would_end_the_run(error: BaseException, waits: bool):
    def score(example: Any, output: Any) -> float:
        raise error

    async def score_later(example: Any, output: Any) -> float:
        raise error

    (output,) = await evaluate(as_evaluator(score_later if waits else score), [ITEM], 10.0)
    assert output.score is None
    assert output.error


def test_a_timeout_is_a_time():
    for timeout in ("5", -1, math.nan):
        with pytest.raises(RequestError, match="`timeout`"):
            as_evaluator(evaluator(timeout=timeout)(lambda example, output: 1.0))
