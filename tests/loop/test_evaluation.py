"""Scores with their intervals."""

import pytest

from etude.core.evaluation import EvalInput, EvalInputItem, EvalOutput, EvalOutputItem, EvaluationRunOutput
from etude.core.stats import estimate
from etude.loop.evaluation import item_rows
from etude.loop.evaluation import scores_of as scores_of_result


def item(name, generation, score, error=None):
    return EvalOutputItem(id=name, generation=generation, score=score, error=error)


def scores_of(items):
    return scores_of_result(EvalOutput(eval_output_items=items))


def test_one_episode_for_each_example_is_an_ordinary_estimate():
    scores = [1.0, 0.0, 1.0, 1.0]
    found = scores_of([item(str(place), 0, score) for place, score in enumerate(scores)])
    expected = estimate(scores)
    assert (found["mean"], found["low"], found["high"]) == (expected.mean, expected.low, expected.high)


def test_episodes_of_one_example_are_no_independent_draws():
    """Ten times the same two answers are no more certain than the two."""
    once = scores_of([item("a", 0, 0.4), item("b", 0, 0.6)])
    often = scores_of([item(name, n, score) for name, score in (("a", 0.4), ("b", 0.6)) for n in range(10)])
    assert (often["mean"], often["low"], often["high"]) == pytest.approx(
        (once["mean"], once["low"], once["high"])
    )
    assert (often["n"], often["scored"]) == (2, 20)


def test_what_has_no_score_is_counted_and_is_no_zero():
    found = scores_of([item("a", 0, 1.0), item("a", 1, None, "failed"), item("b", 0, None, "failed")])
    assert (found["mean"], found["n"], found["scored"], found["unscored"]) == (1.0, 1, 1, 2)


def test_without_any_score_there_is_no_mean():
    found = scores_of([item("a", 0, None, "failed")])
    assert (found["mean"], found["low"], found["high"]) == (None, None, None)


def test_a_row_for_each_episode():
    inputs = [EvalInputItem(id="a", output_obj="4", expected_output_obj="5")]
    outputs = [
        ("right", EvalOutput(eval_output_items=[item("a", 0, 0.0)])),
        ("judged", EvalOutput(eval_output_items=[item("a", 0, None, "no answer")])),
    ]
    output = EvaluationRunOutput(eval_input=EvalInput(eval_input_items=inputs), evaluation_results=outputs)
    (row,) = item_rows(output)
    assert row["scores"] == {"right": 0.0, "judged": None}
    assert row["errors"] == {"judged": "no answer"}
    assert (row["id"], row["output"], row["expected"]) == ("a", "4", "5")
