"""Makes what the example starts from: openings, and a base model that plays carelessly.

    python examples/tictactoe/base.py --seed 0 --out examples/tictactoe/base

The base model first learns from single positions what a free cell is, then imitates whole games of an
agent that often does not look at the board. So it can play, and loses most games by an illegal move.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from etude.core.episode import Example
from etude.core.keys import generator
from etude.core.message import Message
from etude.engines.embedded import EmbeddedEngine
from etude.models.tiny import build_policy, build_tokenizer

from agent import play, points
from task import EMPTY, agent_moves, free_cells, has_won, opponent_moves, put, say, show

sys.path.append(str(Path(__file__).resolve().parents[1]))

from warm_up import Stage, StageReport, command, measure, warm_up, write_examples

TRAIN, HELD_OUT = 1024, 512
SINGLE_POSITIONS, GAMES = 20_000, 4_000
PIECES = "[123][XO_]{3}", "[123](?=<)"
"""The texts that are tokens: a row of the board; the row of a move, and its column."""
CARE = 0.62
"""How often the careless agent looks at the board; otherwise it names any of the nine cells."""
PERCEPTION, REWARD = 0.295, 0.17
FEW, MEASURED = 64, 256


async def build_base(
    folder: Path, seed: int, progress: Callable[[str, float], None]
) -> Sequence[StageReport]:
    """Write `train.jsonl`, `validation.jsonl` and `model/` into `folder`."""
    train = _openings("train", TRAIN, generator(seed, "train"))
    write_examples(folder / "train.jsonl", train)
    write_examples(folder / "validation.jsonl", _openings("held-out", HELD_OUT, generator(seed, "held out")))
    rng = generator(seed, "careless")
    positions = [single_position(rng) for _ in range(SINGLE_POSITIONS)]
    games = [careless_game(rng) for _ in range(GAMES)]
    texts = [message["content"] for game in games[:500] for message in game]
    policy = build_policy(build_tokenizer(texts, splits=PIECES), seed)
    engine = EmbeddedEngine(policy)

    async def reward() -> float:
        # A few show whether it is worth a closer look.
        few = await measure(play, points, engine, train[:FEW], seed=seed)
        if few.high < REWARD:
            return few.mean
        return (await measure(play, points, engine, train[:MEASURED], seed=seed)).mean

    stages = [
        Stage("single positions", positions, at_most=PERCEPTION, batch_size=64),
        Stage("careless games", games, at_least=REWARD, measure=reward),
    ]
    try:
        reports = await warm_up(policy, stages, seed=seed, on_check=progress)
    finally:
        await engine.close()
    policy.export(folder / "model")
    return reports


def single_position(rng: random.Random) -> list[Message]:
    """A position in the middle of some game, and a legal move."""
    while True:
        board = EMPTY
        for turn, cell in enumerate(rng.sample(range(9), rng.randint(2, 7))):
            board = put(board, cell, "XO"[turn % 2])
        if not has_won(board, "X") and not has_won(board, "O"):
            return _turn(board, rng.choice(free_cells(board)))


def careless_game(rng: random.Random) -> list[Message]:
    """A game of the careless agent against a random opponent."""
    board, outcome, messages = _opening(rng), None, []
    while outcome is None:
        cell = rng.choice(free_cells(board)) if rng.random() < CARE else rng.randrange(9)
        messages += _turn(board, cell)
        board, outcome = agent_moves(board, say(cell))
        if outcome is None:
            board, outcome = opponent_moves(board, "random", rng)
    return messages


def _turn(board: str, cell: int) -> list[Message]:
    return [{"role": "user", "content": show(board)}, {"role": "assistant", "content": say(cell)}]


def _opening(rng: random.Random) -> str:
    """An empty board, or one with the opponent's first move: each half of the time."""
    return put(EMPTY, rng.randrange(9), "O") if rng.random() < 0.5 else EMPTY


def _openings(name: str, count: int, rng: random.Random) -> list[Example]:
    return [Example(f"{name}-{i}", {"board": _opening(rng)}) for i in range(count)]


if __name__ == "__main__":
    command(build_base, Path(__file__).parent / "base")
