"""Examples of one's own for an environment that brings its own: those that are named are played."""

from __future__ import annotations

import re

import pytest

import etude
from etude.core.episode import Example
from tests.integrations.games.playing import played
from tests.support import needs

pytestmark = needs("gymnasium", "reasoning_gym", "textarena")

HERE = "tests.integrations.games.careless"
GYM = {"_type": "gym", "id": f"{HERE}:Counting", "validation_size": 3}
REASONING = {"_type": "reasoning_gym", "task": "gcd", "validation_size": 3}
TEXTARENA = {"_type": "textarena", "id": "Nim-v0", "seats": ["policy", "policy"], "max_turns": 40}
MINE = [{"id": "mine-0", "seed": 900, "index": 3}, {"id": "mine-1", "seed": 901, "index": 4}]


@pytest.mark.parametrize("workflow", [GYM, REASONING, TEXTARENA], ids=lambda each: each["_type"])
def test_the_examples_that_a_program_names_are_the_ones_that_are_measured(workflow, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = {"_type": "tests.cli.parts:scripted"}
    run = etude.evaluate(workflow, examples=MINE, model=model, error_budget=1.0, progress=False)
    assert {episode.example.id for episode in run.episodes} == {"mine-0", "mine-1"}


@pytest.mark.parametrize(
    ("workflow", "row", "reason"),
    [
        (GYM, {"question": "q"}, "'mine' cannot start a game: .*Counting needs a whole number as 'seed'"),
        (GYM, {"seed": "soon"}, r"needs a whole number as 'seed', and found a str"),
        (REASONING, {"question": "q", "entry": "{}"}, "the task 'gcd' of reasoning-gym.*'seed', and it"),
        (REASONING, {"seed": 1}, r"needs a whole number as 'index'"),
        (REASONING, {"seed": 1, "index": 0, "question": "q"}, r"has another 'question' than the task 'gcd'"),
    ],
)
async def test_a_row_that_an_environment_cannot_play_is_named_before_a_token_is_sampled(
    journal, workflow, row, reason
):
    (record,) = await played(workflow, journal, ["0"], examples=[Example("mine", row)])
    assert record.failure is not None and not record.calls
    assert re.search(reason, record.failure.reason), record.failure.reason
