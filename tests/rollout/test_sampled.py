"""Figures of what the trained model said, the error budget, and scoring stored episodes again."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.core.call import Call, ChatRequest, Completion, Sampling, Usage
from etude.core.episode import SIMULATED_USER, EpisodeRecord, Example
from etude.core.errors import ErrorBudgetExceeded
from etude.loop.collections import CollectionStats
from etude.rollout.collector import Collector
from etude.rollout.evaluation import ErrorBudget, JournalledEvaluation, rescore
from etude.rollout.evaluator import FunctionEvaluator
from etude.rollout.workflow import Workflow
from etude.store.journal import Journal
from tests.support import ScriptedEngine


def answer(text, logprobs=None, *, model="policy", function="play", temperature=1.0):
    """A call that was answered so."""
    message, tokens = {"role": "assistant", "content": text}, len(text)
    request = ChatRequest(messages=(), sampling=Sampling(temperature=temperature))
    completion = Completion(message, logprobs=logprobs, usage=Usage(3, tokens))
    return Call(0, function, model, request, completion)


def episode(example, generation, *calls, failure=None):
    name = f"train/1/{example}/{generation}"
    return EpisodeRecord(name, Example(example), generation, calls, failure=failure)


def metrics(*episodes):
    collected = CollectionStats()
    for each in episodes:
        collected.add(each, "policy")
    return collected.metrics()


def test_lengths_and_entropy_are_of_the_tokens_that_the_model_sampled():
    figures = metrics(
        episode("a", 0, answer("ab", (-1.0, -3.0)), answer("x", (-50.0,), model="judge")),
        episode("a", 1, answer("abcd", (-0.5, -0.5, -0.5, -0.5))),
        episode("a", 2, answer("user", (-9.0,) * 4, function=SIMULATED_USER)),
        episode("a", 3, answer("greedy", (-9.0,) * 6, temperature=0.0)),
    )
    assert figures["answer_tokens"] == (2 + 4 + 6) / 3
    assert figures["sampled_entropy"] == (1.0 + 3.0 + 4 * 0.5) / 6


@given(st.floats(0, 1), st.integers(1, 30), st.data())
def test_an_early_stop_is_never_hasty(share: float, episodes: int, data: st.DataObject) -> None:
    """A run that is stopped early would have been stopped at its end too."""
    failed = data.draw(st.integers(0, episodes))
    unscored = data.draw(st.integers(0, episodes - failed))
    at_the_end = failed > share * episodes + 1e-9 or unscored > share * (episodes - failed) + 1e-9
    budget = ErrorBudget(share, episodes)
    try:
        for number in range(failed):
            budget.add("timeout", f"train/1/q{number}/0", "no output within 300 s")
        for number in range(unscored):
            budget.add("score:correct", f"train/1/s{number}/0", "the evaluator returned None")
        budget.check(budget.episodes - budget.failed_episodes)
    except ErrorBudgetExceeded:
        assert at_the_end
    else:
        assert not at_the_end


def test_exactly_the_share_may_fail() -> None:
    budget = ErrorBudget(0.29, 100)
    assert 0.29 * 100 < 29
    for number in range(29):
        budget.add("timeout", f"train/1/q{number}/0", "no output within 300 s")
    with pytest.raises(ErrorBudgetExceeded):
        budget.add("timeout", "train/1/last/0", "no output within 300 s")


# One id is the beginning of others, also with the separator of the keys.
EXAMPLES = [Example("q1", {"n": 1}, "a"), Example("q10", {"n": 10}, "b"), Example("q1/05", {"n": 5}, "c")]


async def agent(example: Example, episode: Any) -> str:
    if example.id == "q10" and episode.generation == 1:
        raise ValueError("no idea")
    return (await episode.chat([{"role": "user", "content": example.id}])).text


@pytest.fixture
async def journal(tmp_path: Path) -> Any:
    """A journal with the episodes of two phases, scored 0."""
    engine = ScriptedEngine(lambda request: request.messages[-1]["content"])
    with Journal(tmp_path / "run.db") as journal:
        collector = Collector(Workflow("agent", agent), {"m": engine}, journal)
        run = JournalledEvaluation(
            collector, {"zero": FunctionEvaluator(lambda example, output: 0.0)}, journal
        )
        await run.run(EXAMPLES, phase="train/1", generations=3)
        await run.run(EXAMPLES, phase="train/1/q1", generations=1)
        yield journal


async def test_stored_episodes_are_scored_beside_the_runs_scores_and_what_failed_stays_failed(
    journal: Journal,
) -> None:
    def length(example: Example, output: str, episode: Any) -> float:
        return len(output) + 10 * len(episode.calls) + 100 * example.inputs["n"]

    before = journal.get("train/1/q1/0/score/zero")
    output = await rescore(journal, {"zero": FunctionEvaluator(length)}, phase="train/1", label="b")
    items = output.eval_input.eval_input_items
    assert [(item.id, item.generation) for item in items] == [
        (name, generation) for name in ("q1", "q1/05", "q10") for generation in range(3)
    ]
    scores = [item.score for item in output.evaluator_items("zero")]
    assert scores == [112.0] * 3 + [515.0] * 3 + [1013.0, None, 1013.0]
    assert output.failures == {"raised": 1}
    assert journal.get("train/1/q1/0/score/zero") == before
    assert journal.get("train/1/q1/0/rescore:b/zero")["score"] == 112.0
