"""Examples of one's own for an environment that brings its own: those that are named are played."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import etude
from etude.config.builder import Builder
from etude.config.component import LlmConfig
from etude.config.registry import register_llm
from etude.core.episode import Example
from tests.cli.projects import etude as command
from tests.integrations.games.playing import played
from tests.support import ScriptedEngine, needs, one_quick

pytestmark = needs("gymnasium", "reasoning_gym", "textarena")

HERE = "tests.integrations.games.careless"
GYM = {"_type": "gym", "id": f"{HERE}:Counting", "validation_size": 3}
REASONING = {"_type": "reasoning_gym", "task": "gcd", "validation_size": 3}
TEXTARENA = {"_type": "textarena", "id": "Nim-v0", "seats": ["policy", "policy"], "max_turns": 40}
MINE = [{"id": "mine-0", "seed": 900, "index": 3}, {"id": "mine-1", "seed": 901, "index": 4}]
NAMED = {"mine-0", "mine-1"}


class WordsConfig(LlmConfig, name="test_words"):
    """A model that says one word."""


@register_llm(config_type=WordsConfig)
async def words(config: WordsConfig, builder: Builder) -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine(["[1 1] 0"])
    yield engine
    await engine.close()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def evaluated(workflow: dict[str, Any] | str, **more: Any) -> set[str]:
    """The ids of the examples that an evaluation has played."""
    whole = isinstance(workflow, str) or "workflow" in workflow
    model = {} if whole else {"model": {"_type": "test_words"}}
    run = etude.evaluate(workflow, **model, error_budget=1.0, progress=False, **more)
    return {episode.example.id for episode in run.episodes}


def written(**blocks: Any) -> str:
    """A config file with an environment, and these blocks."""
    config = {"llms": {"policy": {"_type": "test_words"}}, "workflow": GYM, **blocks}
    Path("config.yml").write_text(yaml.safe_dump(config))
    for name in ("mine", "other"):
        rows = [f'{{"id": "{name}-{number}", "seed": {900 + number}}}\n' for number in range(2)]
        Path(f"{name}.jsonl").write_text("".join(rows))
    return "config.yml"


@pytest.mark.parametrize("workflow", [GYM, REASONING, TEXTARENA], ids=lambda each: each["_type"])
def test_the_examples_that_a_program_names_are_the_ones_that_are_measured(workflow):
    assert evaluated(workflow, examples=MINE) == NAMED


@pytest.mark.parametrize(
    ("blocks", "arguments"),
    one_quick(
        (
            {"finetuning": {"run_configuration": {"validation_dataset": "other.jsonl"}}},
            ["-o", "eval.general.dataset=mine.jsonl"],
        ),
        ({"eval": {"general": {"dataset": "mine.jsonl"}}}, []),
        ({}, ["--dataset", "mine.jsonl"]),
        ({"finetuning": {"run_configuration": {"validation_dataset": "mine.jsonl"}}}, []),
    ),
)
def test_a_command_measures_what_it_is_given_before_what_the_file_names_and_that_before_the_environments_own(
    blocks, arguments
):
    shown = command("evaluate", written(**blocks), "--name", "e", *arguments)
    assert shown.exit_code == 0, shown.stderr
    played = {episode.example.id for episode in etude.load_run("e").episodes}
    assert played == NAMED


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
