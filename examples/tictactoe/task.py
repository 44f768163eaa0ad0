"""The game: tic-tac-toe on labelled rows, with an opponent that plays at random or perfectly."""

from __future__ import annotations

import random
import re
from functools import cache
from typing import Literal

Outcome = Literal["win", "draw", "loss", "illegal"]
Opponent = Literal["random", "optimal"]

EMPTY = "_" * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
_MOVE = re.compile(r"<row>([123])</row><column>([123])</column>")


def show(board: str) -> str:
    """The board as the agent sees it: three numbered rows. The agent plays X."""
    return "\n".join(f"{row + 1}{board[3 * row : 3 * row + 3]}" for row in range(3))


def say(cell: int) -> str:
    """A move in words: row, then column."""
    return f"<row>{cell // 3 + 1}</row><column>{cell % 3 + 1}</column>"


def parse(text: str) -> int | None:
    """The cell of a move, from 0 to 8; None for anything that is no move."""
    match = _MOVE.fullmatch(text)
    return None if match is None else 3 * (int(match[1]) - 1) + int(match[2]) - 1


def free_cells(board: str) -> list[int]:
    """The cells that nobody has taken."""
    return [cell for cell, mark in enumerate(board) if mark == "_"]


def put(board: str, cell: int, mark: str) -> str:
    """The board with one mark more."""
    return board[:cell] + mark + board[cell + 1 :]


def has_won(board: str, mark: str) -> bool:
    """Whether `mark` has three in a row."""
    return any(all(board[cell] == mark for cell in line) for line in LINES)


def agent_moves(board: str, text: str) -> tuple[str, Outcome | None]:
    """The board after the agent's move, and the outcome if that ends the game."""
    cell = parse(text)
    if cell is None or board[cell] != "_":
        return board, "illegal"
    board = put(board, cell, "X")
    if has_won(board, "X"):
        return board, "win"
    return board, None if free_cells(board) else "draw"


def opponent_moves(board: str, opponent: Opponent, rng: random.Random) -> tuple[str, Outcome | None]:
    """The board after the opponent's move, and the outcome if that ends the game."""
    cells = free_cells(board) if opponent == "random" else best_cells(board, "O")
    board = put(board, rng.choice(cells), "O")
    if has_won(board, "O"):
        return board, "loss"
    return board, None if free_cells(board) else "draw"


def best_cells(board: str, mark: str) -> list[int]:
    """All perfect moves for `mark`."""
    values = {cell: -_value(put(board, cell, mark), _other(mark)) for cell in free_cells(board)}
    return [cell for cell, value in values.items() if value == max(values.values())]


@cache
def _value(board: str, mark: str) -> int:
    """The result of perfect play for `mark`, who is to move: 1 for a win, 0 for a draw, -1 for a loss."""
    if has_won(board, _other(mark)):
        return -1
    return max((-_value(put(board, cell, mark), _other(mark)) for cell in free_cells(board)), default=0)


def _other(mark: str) -> str:
    return "O" if mark == "X" else "X"
