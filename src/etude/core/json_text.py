"""JSON from outside, read within limits, and values as JSON: exactly (`plain`), or as close as possible.

The limits are there so that no text can exhaust the stack or the memory.
"""

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import jiter
from pydantic_core import from_json, to_json

from etude.core.data_model import finite

DEEPEST = 64
"""Most levels of nested lists and objects. Later code that walks or writes the value may recurse a few times
for each level."""

MOST_VALUES = 2_000_000
"""Most values in one text. A token id of a prompt is one. Commas and brackets in strings count too."""

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_NOT_FINITE = re.compile(rb"-?(?:NaN|Infinity)")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_WHERE = re.compile(r"(.*) at line (\d+) column (\d+)", re.DOTALL)
_MARK = b"\xef\xbb\xbf"
"""The byte-order mark, which some editors write at the start of a file."""
_NOT_UTF8 = "byte 0x{:02x} is not UTF-8 text; save it as UTF-8"
_ESCAPE = 0xDC00
"""The error handler `surrogateescape` adds this to a byte."""
_TOO_DEEP = f"it is nested deeper than {DEEPEST} levels"
_TOO_LARGE = 10**4300
_TOO_LONG = "a whole number has more than 4300 digits; write it as text"
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
    if sum(map(data.count, (b"[", b"{", b","))) >= most_values:
        raise JsonError(f"it has more than {most_values} values")
    try:
        value = jiter.from_json(data, allow_inf_nan=False, catch_duplicate_keys=unique_keys)
    except ValueError as error:
        raise _explain(str(error), data) from None
    _require_plain(value, 1)
    return value


def to_utf8(text: str) -> bytes:
    """Return the text in UTF-8. Raises JsonError for half of a surrogate pair, as a file opened with
    `surrogateescape` has it for each byte that is not UTF-8."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        byte = ord(error.object[error.start]) - _ESCAPE
        raise JsonError(_NOT_UTF8.format(byte) if 0x80 <= byte <= 0xFF else _HALF) from None


def _explain(message: str, data: bytes) -> JsonError:
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
    elif problem == "recursion limit exceeded":
        problem = _TOO_DEEP
    elif problem == "number out of range":
        problem = _TOO_LONG
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


def _require_plain(value: Any, level: int) -> None:
    """Raise JsonError for a number that is not finite, and for more levels than `DEEPEST`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise JsonError("a number is too large for a float; write it as text")
    if isinstance(value, dict | list):
        if level > DEEPEST:
            raise JsonError(_TOO_DEEP)
        for item in value.values() if isinstance(value, dict) else value:
            if isinstance(item, float | dict | list):
                _require_plain(item, level + 1)


def require_limits(value: Any, level: int = 1) -> None:
    """Raise JsonError for more levels of lists and objects than `DEEPEST`, and for a too long number."""
    if isinstance(value, int) and abs(value) >= _TOO_LARGE:
        raise JsonError(_TOO_LONG)
    if isinstance(value, dict | list):
        if level > DEEPEST:
            raise JsonError(_TOO_DEEP)
        for item in value.values() if isinstance(value, dict) else value:
            require_limits(item, level + 1)


_SCALARS = (str, int, float, bool, type(None))


def plain(value: Any) -> Any:
    """Return `value` as JSON gives it back: dicts with text keys, lists and scalars, also of pydantic
    models, dataclasses, and arrays and tensors without dimensions. Raises TypeError for a type that
    JSON cannot keep."""
    if type(value) in _SCALARS:
        return value
    if type(value) is dict or isinstance(value, Mapping):  # The second check alone takes ten times as long.
        copy = {key if type(key) is str else _key(key): plain(inner) for key, inner in value.items()}
        if len(copy) != len(value):
            raise TypeError("a dict with two keys of the same text, such as 1 and '1', is not JSON")
        return copy
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    for scalar in (bool, int, float, str):
        if isinstance(value, scalar):
            return scalar(value)  # An instance of a subclass, such as an enum: JSON keeps its plain value.
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        inner = value.item()
        if type(inner) is not type(value):  # `item()` of numpy.longdouble returns its own type.
            return plain(inner)
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__} is not JSON")


def _key(key: Any) -> str:
    if isinstance(key, str):
        return str(key)
    if key is None or isinstance(key, int | float):
        return json.dumps(key)
    raise TypeError(f"a dict key of type {type(key).__qualname__} is not JSON")


def jsonable(value: Any) -> Any:
    """Return any value as JSON. Values without JSON become text, so a resumed run sees the same values."""
    if value is None or isinstance(value, str):
        return value
    try:
        return from_json(to_json(value, fallback=exact_value, inf_nan_mode="strings"))
    except ValueError:
        # Bytes that are not text, or a structure that contains itself.
        return _ADDRESS.sub("", str(value))


def json_facts(facts: Mapping[Any, Any]) -> dict[str, Any]:
    """Return facts by name, each as `jsonable` returns it. Numbers that are not finite become None."""
    return {str(name): jsonable(finite(value)) for name, value in facts.items()}


def exact_value(value: Any) -> Any:
    """Return numbers and models of other libraries as plain values, and anything else as text.

    An array or an image has a hash of its content, because its text leaves out most of it. Where an object
    lies in memory does not count.
    """
    try:
        return plain(value)
    except TypeError:
        text = _ADDRESS.sub("", str(value))
    has_objects = getattr(getattr(value, "dtype", None), "hasobject", False)  # Their bytes are addresses.
    read = getattr(value, "tolist" if has_objects else "tobytes", getattr(value, "tolist", None))
    if read is None:
        return text
    content = read()
    data = content if isinstance(content, bytes) else _ADDRESS.sub("", repr(content)).encode()
    return f"{text} {hashlib.blake2b(data, digest_size=8).hexdigest()}"
