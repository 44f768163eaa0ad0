"""JSON from outside, read within limits, so that no text can exhaust the stack or the memory."""

import math
import re
from typing import Any

import jiter

DEEPEST = 64
"""Most levels of nested lists and objects. Later code that walks or writes the value may recurse a few times
for each level."""

MOST_VALUES = 2_000_000
"""Most values in one text. Each token id of a prompt is one value."""

_STRUCTURE = re.compile(rb'["\[\]{}]')
_STRING_PIECE = re.compile(rb'(?:[^"\\]{1,4096}+|\\.){0,256}+', re.DOTALL)
"""Limited in length, because other threads wait while a match runs."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_NOT_FINITE = re.compile(rb"-?(?:NaN|Infinity)")
_WHERE = re.compile(r"(.*) at line (\d+) column (\d+)", re.DOTALL)
_MARK = b"\xef\xbb\xbf"
"""The byte-order mark, which some editors write at the start of a file."""
_NOT_UTF8 = "byte 0x{:02x} is not UTF-8 text; save it as UTF-8"
_ESCAPE = 0xDC00
"""The error handler `surrogateescape` adds this to a byte."""
_HALF = "half of a surrogate pair, which is not a character; write the whole character, or leave it out"


class JsonError(ValueError):
    """A text is not JSON, or exceeds the limits."""

    def __init__(self, problem: str, line: int | None = None, column: int | None = None) -> None:
        at = (f"{name} {number}" for name, number in (("line", line), ("column", column)) if number)
        super().__init__(" ".join([problem, *(["at", *at] if line else [])]))
        self.problem = problem
        """The problem without its place."""
        self.line = line
        self.column = column


def read_json(text: bytes | str, *, most_values: int = MOST_VALUES, unique_keys: bool = True) -> Any:
    """Return the value of a JSON text in UTF-8, with or without a byte-order mark.

    Raises JsonError for text that is not JSON, including `NaN` and `Infinity`, and for half of a surrogate
    pair. Also for a key given twice, and for a number too large for a float or with more than 4300 digits.
    Also for more levels or values than the limits. Without `unique_keys`, the last of equal keys counts.
    """
    data = (to_utf8(text) if isinstance(text, str) else text).removeprefix(_MARK)
    _require_limits(data, most_values)
    try:
        value = jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=unique_keys)
    except ValueError as error:
        raise _explained(str(error), data) from None
    if not _is_finite(value):
        raise JsonError("a number is too large for a float; write it as text")
    return value


def to_utf8(text: str) -> bytes:
    """Return the text in UTF-8. Raises JsonError for half of a surrogate pair.

    A file opened with the error handler `surrogateescape` has one for each byte that is not UTF-8. The error
    then says so.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) - _ESCAPE
        raise JsonError(_NOT_UTF8.format(byte) if 0x80 <= byte <= 0xFF else _HALF) from None


def _explained(message: str, data: bytes) -> JsonError:
    """Return the error with a message that says what to do."""
    found = _WHERE.fullmatch(message)
    problem, line, column = (found[1], int(found[2]), int(found[3])) if found else (message, 1, 1)
    start = 0
    for _ in range(line - 1):
        start = data.find(b"\n", start) + 1
    at = start + column - 1
    if "hex escape" in problem or "surrogate" in problem:
        problem = _HALF if _SURROGATE.search(data, max(start, at - 14), at + 1) else problem
    elif problem.startswith("Detected duplicate key"):
        problem = f"{problem.removeprefix('Detected duplicate ')} is given twice; keep one"
    elif problem == "number out of range":
        problem = "a whole number has more than 4300 digits; write it as text"
    elif _NOT_FINITE.match(data, max(start, at - 1)) or _NOT_FINITE.match(data, at):
        problem = "JSON has no NaN and no Infinity; write null"
    else:
        try:
            data.decode()
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            column = error.start - data.rfind(b"\n", 0, error.start)
            problem = _NOT_UTF8.format(data[error.start])
    return JsonError(problem, line, column)


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, items))


def _require_limits(data: bytes, most_values: int) -> None:
    """Count brackets and commas outside of strings, before any value is parsed."""
    opened = data.count(b"[") + data.count(b"{")
    if opened <= DEEPEST and opened + data.count(b",") < most_values:
        return  # Even with the brackets and commas inside strings, the limits hold.
    depth, values, position, end = 0, 1, 0, len(data)
    while (found := _STRUCTURE.search(data, position)) is not None:
        values += data.count(b",", position, found.start())
        position, sign = found.end(), found[0]
        if sign == b'"':
            while position < end and data[position] != 0x22:
                piece = _STRING_PIECE.match(data, position)
                if piece is None or piece.end() == position:
                    return  # A backslash at the very end: the parser reports the error.
                position = piece.end()
            position += 1
        elif sign in b"[{":
            depth += 1
            values += 1
        else:
            depth -= 1
        if depth > DEEPEST:
            line = data.count(b"\n", 0, position) + 1
            raise JsonError(f"it is nested deeper than {DEEPEST} levels", line)
        if values > most_values:
            raise JsonError(f"it has more than {most_values} values")
    if values + data.count(b",", position) > most_values:
        raise JsonError(f"it has more than {most_values} values")
