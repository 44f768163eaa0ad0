"""The examples: their tasks are what their READMEs say, and every method learns them."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from etude.core.episode import call_counts
from etude.core.example import Example
from etude.inference.embedded import EmbeddedEngine
from etude.models.tiny import TinyShape, build_policy, build_tokenizer, texts_of
from etude.rollout.collector import EpisodeJob
from etude.store.journal import Journal
from tests.cli.projects import events, process
from tests.rollout.running import collect

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULES = ("agent", "task", "base")

Load = Callable[[str, str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Imports a module of an example; those of other examples have the same names."""
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}

    def import_from(example: str, name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(EXAMPLES / example))
        return importlib.import_module(name)

    yield import_from
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(before)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12+30", "42"),
        ("7*(2-5)", "-21"),
        ("-3", "-3"),
        ("2**9", "error: only whole numbers, + - * and brackets"),
        ("1.5+1", "error: only whole numbers, + - * and brackets"),
        ("True+1", "error: only whole numbers, + - * and brackets"),
        ("__import__('os')", "error: only whole numbers, + - * and brackets"),
        ("999999*999999*9", "error: the number is too large"),
        ("1" * 41, "error: expected an expression of at most 40 characters"),
        ("(" * 40, "error: '(' was never closed (<unknown>, line 1)"),
    ],
)
def test_the_calculator_knows_three_operations_and_nothing_else(load, expression, value):
    assert load("calculator", "task").calculator(expression) == value


def test_the_careless_agent_is_right_in_about_a_third(load):
    base = load("calculator", "base")
    rng = random.Random(1)
    questions = load("calculator", "task").draw_questions(2000, rng)
    said = [base.careless_transcript(question, rng)[-1]["content"] for question in questions]
    right = sum(text == question.answer for text, question in zip(said, questions, strict=True))
    assert 0.32 < right / 2000 < 0.38


def games(task: ModuleType, agent: Callable[[str, random.Random], int], opponent: str) -> Counter[str]:
    rng, outcomes = random.Random(1), Counter[str]()
    for _ in range(300):
        board, outcome = task.EMPTY, None
        while outcome is None:
            board, outcome = task.agent_moves(board, task.say(agent(board, rng)))
            if outcome is None:
                board, outcome = task.opponent_moves(board, opponent, rng)
        outcomes[outcome] += 1
    return outcomes


def test_nobody_beats_the_optimal_opponent(load):
    task = load("tictactoe", "task")
    at_random = games(task, lambda board, rng: rng.choice(task.free_cells(board)), "optimal")
    assert at_random["win"] == 0
    perfect = games(task, lambda board, rng: rng.choice(task.best_cells(board, "X")), "optimal")
    assert perfect == {"draw": 300}


def test_perfect_play_never_loses_to_a_random_opponent(load):
    task = load("tictactoe", "task")
    outcomes = games(task, lambda board, rng: rng.choice(task.best_cells(board, "X")), "random")
    assert outcomes["loss"] == outcomes["illegal"] == 0


@pytest.mark.parametrize("text", ["", "5", "<row>4</row><column>1</column>", "<row>1</row>"])
def test_what_is_no_move_is_illegal(load, text):
    task = load("tictactoe", "task")
    assert task.agent_moves(task.EMPTY, text) == (task.EMPTY, "illegal")


def test_row_and_column_of_a_move_are_tokens_of_their_own(load):
    base = load("tictactoe", "base")
    games = [base.careless_game(random.Random(seed)) for seed in range(50)]
    tokenizer = build_tokenizer(texts_of(games), splits=base.PIECES)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("<row>2</row><column>3</column>")["input_ids"])
    assert tokens == ["<row>", "2", "</row><column>", "3", "</column>"]


def test_the_careless_reader_mixes_half_of_the_fields_up_and_talks_at_times(load):
    task, base, score = (load("extraction", name) for name in ("task", "base", "agent"))
    rng, shares = random.Random(1), []
    for note, order in task.draw_notes(2000, rng).items():
        said = base.careless_transcript(note, order, rng)[-1]["content"]
        if said.startswith("{"):
            shares.append(score.fields_right(Example("one", {}, order.model_dump()), json.loads(said)))
    assert 0.82 < len(shares) / 2000 < 0.88
    assert 0.54 < sum(shares) / len(shares) < 0.62


async def test_an_answer_keeps_to_the_schema_though_nothing_was_learnt(load, tmp_path):
    """Weights are random: all that makes an order of the answer is the schema."""
    task, agent = load("extraction", "task"), load("extraction", "agent")
    notes = task.draw_notes(8, random.Random(1))
    policy = build_policy(build_tokenizer(notes, vocab_size=320), 0, TinyShape(max_context=512))
    engine = EmbeddedEngine(policy, max_tokens=400)
    examples = [Example(note, {"note": note}, order.model_dump()) for note, order in notes.items()]
    work = [EpisodeJob(f"eval/{number}/0", example) for number, example in enumerate(examples)]
    with Journal(tmp_path / "run.db") as journal:
        records = await collect(agent.extract, journal, models={"reader": engine}, work=work)
    await engine.close()
    orders = [task.Order.model_validate(record.output) for record in records if record.failure is None]
    cut_off = [call_counts(record)["cut_off"] for record in records if record.failure is not None]
    assert len(orders) >= 4 and cut_off == [1] * (8 - len(orders))


GOALS = {
    "calculator": (0.45, 0.9, 0.97),
    "tictactoe": (0.25, 0.6, 0.6),
    "sort": (0.45, 0.85, 0.9),
    "extraction": (0.6, 0.8, 0.8),
}
"""The most that a base may reach, and the least after GRPO: sampled, and greedy."""


@pytest.mark.slow
@pytest.mark.parametrize("task", GOALS)
def test_grpo_reaches_the_goal(task, tmp_path):
    report = demonstrate(task, "grpo", tmp_path / "demo")
    most, least, least_greedy = GOALS[task]
    assert rewards(report["before"])["mean"] <= most
    assert rewards(report["after"])["mean"] >= least
    assert rewards(report["greedy"])["mean"] >= least_greedy


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "expert_iteration"])
@pytest.mark.parametrize("task", GOALS)
def test_every_method_improves_every_task(task, method, tmp_path):
    report = demonstrate(task, method, tmp_path / "demo")
    assert rewards(report["after"])["low"] > rewards(report["before"])["high"]


def demonstrate(task: str, method: str, out: Path) -> dict[str, Any]:
    """The report of a demo, made by the command."""
    arguments = ["--task", task, "--method", method, "--seed", "7", "--out", out, "--json"]
    started = process("demo", *arguments, folder=out.parent)
    output, errors = started.communicate(timeout=1200)
    assert started.returncode == 0, errors
    return events(output)[-1]


def rewards(evaluation: dict[str, Any]) -> dict[str, float]:
    """Mean and interval of the evaluator that is the reward."""
    return evaluation["scores"][evaluation["reward"]]
