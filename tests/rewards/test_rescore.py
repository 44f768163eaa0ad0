"""Scoring stored episodes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.core.episode import Example
from etude.rewards.evaluation_run import EvaluationRun, rescore
from etude.rewards.evaluator import FunctionEvaluator
from etude.rollout.collector import Collector
from etude.rollout.workflow import Workflow
from etude.store.journal import Journal
from tests.support import ScriptedEngine

# One id is the beginning of others, also with the separator of the keys.
EXAMPLES = [Example("q1", {"n": 1}, "a"), Example("q10", {"n": 10}, "b"), Example("q1/05", {"n": 5}, "c")]


async def agent(example: Example, episode: Any) -> str:
    if example.id == "q10" and episode.generation == 1:
        raise ValueError("no idea")
    return (await episode.chat([{"role": "user", "content": example.id}])).text


@pytest.fixture
async def stored(tmp_path: Path) -> Any:
    """A journal with the episodes of two phases, scored 0."""
    engine = ScriptedEngine(lambda request: request.messages[-1]["content"])
    with Journal(tmp_path / "run.db") as journal:
        collector = Collector(Workflow("agent", agent), {"m": engine}, journal)
        run = EvaluationRun(collector, {"zero": constant(0.0)}, journal)
        await run.run(EXAMPLES, phase="train/1", generations=3)
        await run.run(EXAMPLES, phase="train/1/q1", generations=1)
        yield journal


def constant(value: Any) -> FunctionEvaluator:
    return FunctionEvaluator(lambda example, output: value)


async def test_stored_episodes_are_scored_and_what_failed_stays_failed(stored: Journal) -> None:
    def length(example: Example, output: str, episode: Any) -> float:
        return len(output) + 10 * len(episode.calls) + 100 * example.inputs["n"]

    output = await rescore(stored, {"length": FunctionEvaluator(length)}, phase="train/1", label="b")
    items = output.eval_input.eval_input_items
    assert [(item.id, item.generation) for item in items] == [
        (name, generation) for name in ("q1", "q1/05", "q10") for generation in range(3)
    ]
    scores = [item.score for item in output.results_of("length")]
    assert scores == [112.0] * 3 + [515.0] * 3 + [1013.0, None, 1013.0]
    assert output.failures == {"raised": 1}


async def test_the_scores_that_the_run_went_by_are_left_alone(stored: Journal) -> None:
    before = stored.get("train/1/q1/0/score/zero")
    await rescore(stored, {"zero": constant(1.0)}, phase="train/1", label="b")
    assert stored.get("train/1/q1/0/score/zero") == before
    assert stored.get("train/1/q1/0/rescore:b/zero")["score"] == 1.0
