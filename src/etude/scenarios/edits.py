"""Comparing a program with a changed one."""

from __future__ import annotations

import ast
import io
import re
import tokenize

_BLOCK = re.compile(r"^```[^\S\n]*(\w*)[^\S\n]*\n(.*?)^```[^\S\n]*$", re.DOTALL | re.MULTILINE)
_MOST_CELLS = 4_000_000
"""Of the table of the edit distance: more would take longer than the number is worth."""


def program_in(text: str) -> str | None:
    """The last Python code block of an answer that can be parsed; None where there is none."""
    for language, block in reversed(_BLOCK.findall(text)):
        if language.lower() in ("", "python", "python3", "py") and _parsed(block) is not None:
            return str(block)
    return None


def same_program(one: str, other: str) -> bool:
    """Whether two programs differ in nothing but layout and comments."""
    first, second = _parsed(one), _parsed(other)
    if first is None or second is None:
        return one == other
    return ast.dump(first) == ast.dump(second)


def comments(program: str) -> int:
    """How many comments a program has."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(program).readline))
    except (tokenize.TokenError, SyntaxError):
        return 0
    return sum(token.type == tokenize.COMMENT for token in tokens)


def edit_distance(one: str, other: str) -> int | None:
    """The Levenshtein distance of two texts; None when they differ in too much to tell."""
    start = 0
    while start < min(len(one), len(other)) and one[start] == other[start]:
        start += 1
    one, other = one[start:], other[start:]
    while one and other and one[-1] == other[-1]:
        one, other = one[:-1], other[:-1]
    if len(one) * len(other) > _MOST_CELLS:
        return None
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, 1):
        diagonal, row[0] = row[0], number
        for column, found in enumerate(other, 1):
            diagonal, row[column] = (
                row[column],
                min(diagonal + (letter != found), row[column] + 1, row[column - 1] + 1),
            )
    return row[-1]


def _parsed(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
