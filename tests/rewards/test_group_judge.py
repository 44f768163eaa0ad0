"""A model that compares the episodes of one example."""

from __future__ import annotations

import json
from typing import Any

import pytest

from etude.core.call import Call, ChatRequest, Completion
from etude.core.episode import EpisodeRecord, Example
from etude.core.evaluation import EvalInputItem, EvalOutputItem
from etude.rewards.judge import GroupJudge, GroupJudgeConfig
from etude.rewards.scorer import evaluate
from tests.support import ScriptedEngine

SYSTEM = {"role": "system", "content": "Add. " * 100}
QUESTION = {"role": "user", "content": "2 + 2"}


def item(generation: int, answer: str) -> EvalInputItem:
    call = Call(
        index=0,
        function="<workflow>",
        model="policy",
        request=ChatRequest((SYSTEM, QUESTION)),
        completion=Completion({"role": "assistant", "content": answer}),
    )
    record = EpisodeRecord(f"e/{generation}", Example("q"), generation, (call,), output=answer)
    return EvalInputItem(
        id="q", generation=generation, expected_output_obj="4", output_obj=answer, episode=record
    )


def scores(*values: float) -> str:
    judged = [{"attempt": n, "reasoning": f"no. {n}", "score": value} for n, value in enumerate(values, 1)]
    return json.dumps({"scores": judged})


async def judged(engine: ScriptedEngine, *answers: str, **fields: Any) -> list[EvalOutputItem]:
    config = GroupJudgeConfig.model_validate({"model": "judge"} | fields)
    items = [item(generation, answer) for generation, answer in enumerate(answers)]
    return await evaluate(GroupJudge(config, engine), items, 5)


async def test_one_call_scores_the_whole_group() -> None:
    engine = ScriptedEngine([scores(0.9, 0.1, 0.4)])
    outputs = await judged(engine, "4", "5", "four?")
    assert [(output.generation, output.score, output.reasoning) for output in outputs] == [
        (0, 0.9, "no. 1"),
        (1, 0.1, "no. 2"),
        (2, 0.4, "no. 3"),
    ]
    assert len(engine.requests) == 1


async def test_what_all_attempts_begin_with_is_shown_once() -> None:
    engine = ScriptedEngine([scores(0.9, 0.1)])
    await judged(engine, "4", "5", rubric="Be strict.")
    system, user = engine.requests[0].messages
    assert "Be strict." in system["content"]
    assert json.loads(user["content"]) == {
        "expected": "4",
        "beginning_of_all_attempts": [SYSTEM, QUESTION],
        "attempts": [
            {"attempt": 1, "messages": [{"role": "assistant", "content": "4"}]},
            {"attempt": 2, "messages": [{"role": "assistant", "content": "5"}]},
        ],
    }


async def test_attempts_that_say_the_same_are_shown_once_and_score_the_same() -> None:
    engine = ScriptedEngine([scores(0.9, 0.1)])
    outputs = await judged(engine, "4", "5", "4")
    assert [output.score for output in outputs] == [0.9, 0.1, 0.9]
    assert engine.requests[0].messages[1]["content"].count('"attempt"') == 2


MALFORMED = {
    "one too few": scores(0.9),
    "one twice": scores(0.9, 0.1).replace('"attempt": 2', '"attempt": 1'),
    "out of range": scores(0.9, 1.5),
    "a list alone": "[0.9, 0.1]",
}


@pytest.mark.parametrize("answer", MALFORMED.values(), ids=MALFORMED.keys())
async def test_a_malformed_judgement_is_asked_for_again(answer: str) -> None:
    engine = ScriptedEngine([answer, scores(0.9, 0.1)])
    assert [output.score for output in await judged(engine, "4", "5")] == [0.9, 0.1]
    assert len(engine.requests) == 2
