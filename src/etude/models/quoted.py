"""End marks of tool calls that stand in strings of their arguments, where they end nothing.

A model that writes about models writes `</tool_call>` into an argument. A call ends with the first mark
before which it is whole; those in its strings are hidden while the text is parsed.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
_SPACE = re.compile(r"\s*")
_PRIVATE = range(0xE000, 0xF900)
"""Characters that stand for nothing in Unicode."""
_MOST_ENDS = 32
"""End marks at which it is tried whether a call of Python text is whole."""


def hide_end_marks(text: str, opened: Any, closed: Any) -> tuple[str, Mapping[int, str]]:
    """The text with other characters for end marks in the strings of calls; the table by which
    `str.translate` puts them back, empty where there are none.

    `opened` and `closed` are compiled patterns of the marks around a call.
    """
    unused = (chr(code) for code in _PRIVATE if chr(code) not in text)
    hidden: dict[str, str] = {}
    characters = list(text)
    for start, end in _calls(text, opened, closed):
        for string in _STRING.finditer(text, start, end):
            for mark in closed.finditer(text, *string.span()):
                # A mark that is only looked ahead to has no length, and stops at its first character.
                for at in range(mark.start(), min(max(mark.end(), mark.start() + 1), string.end() - 1)):
                    characters[at] = hidden.setdefault(text[at], "") or next(unused)
                    hidden[text[at]] = characters[at]
    return "".join(characters), {ord(stand_in): character for character, stand_in in hidden.items()}


def _calls(text: str, opened: Any, closed: Any) -> Iterator[tuple[int, int]]:
    """Where the whole calls stand between their marks."""
    mark = opened.search(text)
    while mark is not None:
        start = _SPACE.match(text, mark.end()).end()  # type: ignore[union-attr]  # It always matches.
        end = _json_end(text, start) or _python_end(text, start, closed)
        if end:
            yield start, end
        mark = opened.search(text, max(end, mark.end()))


def _json_end(text: str, start: int) -> int:
    """Where the JSON value ends that begins at `start`; 0 where there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, start)[1]
    except (ValueError, RecursionError):
        return 0


def _python_end(text: str, start: int, closed: Any) -> int:
    """The first end mark before which the text from `start` on is an expression; 0 where there is none."""
    for _, mark in zip(range(_MOST_ENDS), closed.finditer(text, start), strict=False):
        try:
            ast.parse(text[start : mark.start()].strip(), mode="eval")
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        return int(mark.start())
    return 0
