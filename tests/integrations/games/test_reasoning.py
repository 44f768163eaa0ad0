"""reasoning-gym's tasks; and examples of one's own for an environment that brings its own."""

import re

import pytest

import etude
from etude.core.episode import Example
from etude.core.errors import DatasetError, RequestError
from etude.integrations.games.reasoning import ReasoningGymDatasetConfig, make_dataset
from tests.integrations.games.playing import play, scores
from tests.support import needs

pytestmark = needs("gymnasium", "reasoning_gym", "textarena")

GCD = {"_type": "reasoning_gym", "task": "gcd", "config": {"max_value": 40}}


def examples(**keys):
    return ReasoningGymDatasetConfig(task="gcd", **keys).examples()


async def test_an_answer_is_scored_by_the_task(journal):
    def solve(request):
        question = request.messages[0]["content"]
        rows = examples(config={"max_value": 40}, size=4)
        return next(row.expected for row in rows if row.inputs["question"] in question)

    tagged = GCD | {"prompt": "Think! {question}"}
    right = await play(
        tagged, journal, lambda request: f"Well, <answer> {solve(request)} </answer>.", games=2
    )
    assert [scores(record) for record in right] == [{"reward": 1.0}] * 2
    assert right[0].calls[0].request.messages[0]["content"].startswith("Think! Find the Greatest")
    others = examples(config={"max_value": 40}, size=1, seed=1)
    assert scores((await play(GCD, journal, ["no idea"], examples=others))[0]) == {"reward": 0.0}


def test_examples_are_stable_and_no_question_is_in_both_splits():
    assert examples(size=20)[:5] == examples(size=5)
    train = {row.inputs["question"] for row in examples(size=200)}
    held_out = {row.inputs["question"] for row in examples(size=60, split="validation", seed=3)}
    assert (len(train), len(held_out)) == (200, 60) and not train & held_out


def test_what_a_task_does_not_have_is_said():
    with pytest.raises(DatasetError, match=r" \d+ different questions .*validation, .* 50 "):
        examples(config={"max_value": 6}, size=50, split="validation")
    with pytest.raises(RequestError, match=r"reasoning-gym's 'gdc'.*'gcd'"):
        make_dataset("gdc", {}, 0)
    with pytest.raises(RequestError, match=r"'gcd' .*\{'max': 3\}"):
        make_dataset("gcd", {"max": 3}, 0)


HERE = "tests.integrations.games.careless"
GYM = {"_type": "gym", "id": f"{HERE}:Counting", "validation_size": 3}
REASONING = {"_type": "reasoning_gym", "task": "gcd", "validation_size": 3}
TEXTARENA = {"_type": "textarena", "id": "Nim-v0", "seats": ["policy", "policy"], "max_turns": 40}
MINE = [{"id": "mine-0", "seed": 900, "index": 3}, {"id": "mine-1", "seed": 901, "index": 4}]


@pytest.mark.parametrize("workflow", [GYM, REASONING, TEXTARENA], ids=lambda each: each["_type"])
def test_the_examples_that_a_program_names_are_the_ones_that_are_measured(workflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"_type": "tests.cli.parts:open_scripted"}
    run = etude.evaluate(workflow, examples=MINE, model=model, error_budget=1.0, progress=False)
    assert {episode.example.id for episode in run.episodes} == {"mine-0", "mine-1"}


@pytest.mark.parametrize(
    ("workflow", "row", "reason"),
    [
        (GYM, {"question": "q"}, "'mine' .*Counting .*'seed'"),
        (GYM, {"seed": "soon"}, r"'seed', .*found a str"),
        (REASONING, {"question": "q", "entry": "{}"}, "'gcd' of reasoning-gym.*'seed'"),
        (REASONING, {"seed": 1}, r"'gcd'.* whole number as 'index'"),
        (REASONING, {"seed": 1, "index": 0, "question": "q"}, r"another 'question' .*'gcd'"),
    ],
)
async def test_a_row_that_an_environment_cannot_play_is_named_before_a_token_is_sampled(
    journal, workflow, row, reason
):
    (record,) = await play(workflow, journal, ["0"], examples=[Example("mine", row)])
    assert record.failure is not None and not record.calls
    assert re.search(reason, record.failure.reason), record.failure.reason
