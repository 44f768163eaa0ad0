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


def same_program(program: str, other: str) -> bool:
    """Whether two programs differ in nothing but layout and comments."""
    tree, other_tree = _parsed(program), _parsed(other)
    if tree is None or other_tree is None:
        return program == other
    return ast.dump(tree) == ast.dump(other_tree)


def comments(program: str) -> int:
    """How many comments a program has."""
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(program).readline))
    except (tokenize.TokenError, SyntaxError):
        return 0
    return sum(token.type == tokenize.COMMENT for token in tokens)


def edit_distance(first: str, second: str) -> int | None:
    """The Levenshtein distance of two texts; None when they differ in too much to tell."""
    start = 0
    while start < min(len(first), len(second)) and first[start] == second[start]:
        start += 1
    first, second = first[start:], second[start:]
    while first and second and first[-1] == second[-1]:
        first, second = first[:-1], second[:-1]
    if len(first) * len(second) > _MOST_CELLS:
        return None
    row = list(range(len(second) + 1))
    for number, letter in enumerate(first, 1):
        diagonal, row[0] = row[0], number
        for column, character in enumerate(second, 1):
            diagonal, row[column] = (
                row[column],
                min(diagonal + (letter != character), row[column] + 1, row[column - 1] + 1),
            )
    return row[-1]


def _parsed(program: str) -> ast.Module | None:
    try:
        return ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
