"""The evaluators of single plays."""

from __future__ import annotations

from typing import Any

import pytest

from etude.core.evaluation import EvalInputItem
from etude.protocols import EpisodeTree
from etude.protocols.tree import Node
from etude.rewards.scorer import evaluate
from etude.scenarios.measures import (
    NeitherConfig,
    NoDecisionConfig,
    RetryProportionConfig,
    TokenLimitProportionConfig,
    VerdictAccuracyConfig,
    accuracy,
    endings,
    play_evaluator,
)
from tests.scenarios.plays import simple, tree, verdict_node


def branched() -> EpisodeTree:
    """Two answers of the prover; after the first the verifier is right, after the second one time in two."""
    first, second = (Node(n, None, 0, "prover", n, "x", {"main": "x"}) for n in (0, 1))
    return tree([first, second, verdict_node(2, 0, 1.0), verdict_node(3, 1, 1.0), verdict_node(4, 1, None)])


def test_each_way_of_a_play_counts_by_how_likely_it_was():
    assert [(ending.weight, ending.code) for ending in endings(branched())] == [
        (0.5, 1),
        (0.25, 1),
        (0.25, 2),
    ]
    assert accuracy(branched()) == 0.75


@pytest.mark.parametrize(
    ("verdict", "truth", "right"),
    [
        (1.0, 1, 1),
        (-1.0, 1, 0),
        (-1.0, 0, 1),
        (0.2, 1, 1),
        (-0.2, 0, 1),
        (0.0, 1, 0),
        (0.0, 0, 0),
        (None, 0, 0),
    ],
)
def test_a_verdict_is_right_by_its_sign(verdict: float | None, truth: Any, right: float):
    assert accuracy(simple(verdict, truth)) == right


async def score(config: Any, played: Any) -> float | None:
    evaluators = [evaluator async for evaluator in play_evaluator(config, None)]  # type: ignore[arg-type]
    (output,) = await evaluate(evaluators[0], [EvalInputItem(id="e", output_obj=played)], 5)
    return output.score if output.error is None else output.error  # type: ignore[return-value]


async def test_evaluators_score_a_play():
    played = simple(1.0, retries=2, cut_off=True).to_json()
    assert await score(VerdictAccuracyConfig(), played) == 1
    assert await score(VerdictAccuracyConfig(), branched().to_json()) == 0.75
    assert await score(NoDecisionConfig(), branched().to_json()) == 0.25
    assert await score(NeitherConfig(), simple(0.0).to_json()) == 1
    assert await score(RetryProportionConfig(agent="verifier"), played) == 1
    assert await score(RetryProportionConfig(agent="prover"), played) == 0
    assert await score(TokenLimitProportionConfig(agent="prover"), played) == 1


async def test_what_cannot_be_scored_has_a_reason():
    assert "was a protocol played in it?" in str(await score(VerdictAccuracyConfig(), "text"))
    wrong_name = await score(RetryProportionConfig(agent="verifer"), simple(1.0).to_json())
    assert "no agent 'verifer'; did you mean 'verifier'" in str(wrong_name)
    silent = tree([verdict_node(0, None, 1.0)]).to_json()
    assert await score(RetryProportionConfig(agent="prover"), silent) == "the agent had no turn in this play"
