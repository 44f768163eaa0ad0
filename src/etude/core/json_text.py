"""JSON from outside: read within limits, so that no text can exhaust the stack or the memory."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import from_json

DEEPEST = 64
"""Levels of lists and objects in one another. What walks through a value, and what is written with it later,
may recurse a few times for each."""

MOST_VALUES = 2_000_000
"""Values of one text: a prompt's token ids are one each."""

_STRUCTURE = re.compile(rb'["\[\]{}]')
_STRING_PIECE = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,256}+', re.DOTALL)
"""Of limited length, because other threads wait for as long as a match takes."""


def read_json(
    text: bytes | str, *, deepest: int = DEEPEST, most_values: int = MOST_VALUES, finite: bool = True
) -> Any:
    """The value of a JSON text in UTF-8; with `finite`, `NaN` and `Infinity` are no numbers.

    Raises ValueError for what is no JSON, for half of a surrogate pair, and for more levels or values than
    the limits.
    """
    data = text.encode() if isinstance(text, str) else text
    _require_limits(data, deepest, most_values)
    return from_json(data, allow_inf_nan=not finite)


def _require_limits(data: bytes, deepest: int, most_values: int) -> None:
    """Look at brackets and commas outside of strings, without making values of them."""
    opened = data.count(b"[") + data.count(b"{")
    if opened <= deepest and opened + data.count(b",") < most_values:
        return  # There are no more, even with those in strings.
    depth, values, position, end = 0, 1, 0, len(data)
    while (found := _STRUCTURE.search(data, position)) is not None:
        values += data.count(b",", position, found.start())
        position, sign = found.end(), found[0]
        if sign == b'"':
            while position < end and data[position] != 0x22:
                piece = _STRING_PIECE.match(data, position)
                if piece is None or piece.end() == position:
                    return  # A backslash at the very end: the parser says what is wrong.
                position = piece.end()
            position += 1
        elif sign in b"[{":
            depth += 1
            values += 1
        else:
            depth -= 1
        if depth > deepest:
            raise ValueError(f"it is nested deeper than {deepest} levels")
        if values > most_values:
            raise ValueError(f"it has more than {most_values} values")
    if values + data.count(b",", position) > most_values:
        raise ValueError(f"it has more than {most_values} values")
