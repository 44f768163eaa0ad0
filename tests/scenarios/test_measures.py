"""Measures of single plays, as evaluators, and of many plays, as a summary."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.load import parse_config
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem
from etude.core.stats import estimate
from etude.protocols import EpisodeTree
from etude.protocols.tree import Node
from etude.rewards.scorer import evaluate
from etude.scenarios.measures import (
    Conduct,
    NeitherConfig,
    NoDecisionConfig,
    RetryProportionConfig,
    TokenLimitProportionConfig,
    VerdictAccuracyConfig,
    accuracy,
    conduct,
    endings,
    play_evaluator,
)
from etude.scenarios.summary import summarise, summarise_phase
from etude.store.encode import encode_episode
from etude.store.journal import Journal
from tests.scenarios.plays import failure, record, simple, tree, verdict_node

# One play.


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


def test_an_answer_counts_once_however_often_it_stands_in_the_tree():
    provers = [Node(0, None, 0, "prover", 0, "x"), Node(1, None, 0, "prover", 1, "y", truncated=True)]
    verifiers = [verdict_node(n, n - 2, 1.0, call=2, round=0, malformed="?") for n in (2, 3)]
    assert conduct(tree([*provers, *verifiers])) == {
        "prover": Conduct(2, 0, 0, 1),
        "verifier": Conduct(1, 0, 1, 0),
    }


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


def test_a_config_names_them():
    config = parse_config(
        {
            "llms": {"policy": {"_type": "openai", "model_name": "m", "base_url": "http://x"}},
            "workflow": {"_type": "protocol", "protocol": "nip", "scenario": "code_validation"},
            "eval": {
                "general": {"dataset": {"_type": "buggy_apps", "split": "test"}},
                "evaluators": {
                    "accuracy": {"_type": "verdict_accuracy"},
                    "retries": {"_type": "retry_proportion", "agent": "prover"},
                },
            },
        }
    )
    assert isinstance(config.eval.evaluators["accuracy"], VerdictAccuracyConfig)


# Many plays.


def test_a_table_worked_out_by_hand():
    plays = [
        record("a", simple(1.0, 1)),
        record("b", simple(-1.0, 1)),
        record("c", simple(-1.0, 0)),
        record("d", simple(-1.0, 0)),
        record("e", simple(1.0, 0)),
        record("f", simple(None, 0)),
        record("g", simple(0.0, 1)),
        record("h", simple(1.0, 1, retries=1)),
        failure("i"),
    ]
    found = summarise(plays)
    assert (found.episodes, found.failed, found.examples) == (8, 1, 8)
    assert found.accuracy == estimate([1, 0, 1, 1, 0, 0, 0, 1])
    assert found.accuracy_right_programs == estimate([1, 0, 0, 1])
    assert found.accuracy_wrong_programs == estimate([1, 1, 0, 0])
    assert found.precision == estimate([1, 0, 1])
    assert found.recall == estimate([1, 0, 0, 1])
    assert found.no_decision == found.neither == estimate([1, 0, 0, 0, 0, 0, 0, 0])
    assert found.worst_example_accuracy == 0
    assert found.always_wrong == estimate([0, 1, 0, 0, 1, 1, 1, 0])
    assert found.asked_again["verifier"] == estimate([0, 0, 0, 0, 0, 0, 0, 1])
    assert found.token_limit["prover"] == estimate([0.0] * 8)
    assert found.rewards["verifier"].mean == pytest.approx((1 - 1 + 1 + 1 - 1 + 0 + 0 + 1) / 8)
    assert found.rounds.mean == 2
    shares = (3 / 8, 3 / 8, 1 / 8, 1 / 8)
    assert found.decision_entropy == pytest.approx(-sum(p * math.log2(p) for p in shares))
    assert found.mean_verdict is not None and found.mean_verdict.mean == pytest.approx(0)


def test_plays_of_one_example_are_one_observation():
    plays = [record(name, simple(1.0, 1), n) for name in "ab" for n in range(50)]
    plays += [record("c", simple(-1.0, 1), n) for n in range(50)]
    found = summarise(plays)
    assert (found.episodes, found.accuracy.n) == (150, 3)
    assert found.accuracy == estimate([1, 1, 0])
    assert found.worst_example_accuracy == 0


def test_the_worst_example_is_by_its_mean():
    verdicts = {"a": [1.0, 1.0, -1.0, 1.0], "b": [1.0, -1.0, -1.0, -1.0]}
    plays = [record(name, simple(v), n) for name, several in verdicts.items() for n, v in enumerate(several)]
    found = summarise(plays)
    assert found.worst_example_accuracy == 0.25
    assert found.always_wrong.mean == 0
    assert found.precision is not None and (found.precision.mean, found.precision.n) == (1, 2)


def test_nothing_accepted_has_no_precision_and_one_class_no_other():
    found = summarise([record("a", simple(-1.0, 0)), record("b", simple(-1.0, 0))])
    assert found.precision is None and found.recall is None and found.accuracy_right_programs is None
    assert found.decision_entropy == 0


def test_a_summary_is_json():
    data = json.loads(json.dumps(summarise([record("a", simple(1.0))]).to_json()))
    assert data["accuracy"] == {"mean": 1, "low": pytest.approx(0.2065, abs=1e-3), "high": 1, "n": 1}
    assert data["accuracy_wrong_programs"] is None
    assert set(data["asked_again"]) == {"prover", "verifier"}


def test_what_agents_earn_has_an_interval_within_the_bounds_of_the_protocol():
    found = summarise([record(str(n), simple(-1.0)) for n in range(16)])
    earned = found.rewards["verifier"]
    assert (earned.mean, earned.low) == (-1.0, -1.0) and -0.7 < earned.high < -0.5
    assert found.rounds.low >= 1, "a play has at least one round"


def test_nothing_cannot_be_summed_up():
    with pytest.raises(RequestError, match="1 episodes, and all have failed"):
        summarise([failure("a")])


async def test_a_phase_of_a_run_is_summed_up(tmp_path: Path):
    with Journal(tmp_path / "run.db") as journal:
        for name, verdict in (("a", 1.0), ("b", -1.0)):
            await journal.put(f"test/{name}/0", encode_episode(record(name, simple(verdict)), {}))
        assert summarise_phase(journal, "test").accuracy == estimate([1, 0])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([1.0, -1.0, 0.0, None])), min_size=1))
def test_shares_are_shares_and_intervals_hold_their_means(verdicts: list[tuple[str, float | None]]):
    plays = [record(name, simple(verdict, int(name < "c")), n) for n, (name, verdict) in enumerate(verdicts)]  # type: ignore[arg-type]
    found = summarise(plays)
    for one in (found.accuracy, found.precision, found.recall, found.no_decision, found.neither):
        if one is not None:
            assert 0 <= one.mean <= 1 and one.low <= one.mean + 1e-9 and one.mean <= one.high + 1e-9
    assert found.accuracy.mean + found.no_decision.mean <= 1 + 1e-9
    assert 0 <= found.decision_entropy <= 2 + 1e-9
