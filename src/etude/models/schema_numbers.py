"""The numbers of a JSON schema, as a grammar can keep them."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from etude.core.errors import ImpossibleCall

_EXACT = 2**53
"""llguidance reads numbers as 64-bit floats, which have all whole numbers below it."""
_LARGEST = 2**63 - 1
"""It holds whole numbers to no bounds beyond."""
_FARTHEST = 2**63 - 1024
"""The largest of such floats within these bounds."""
_POWERS = 22
"""The power of ten up to which all of them are floats."""
_LONGEST = 2**32 - 1
"""Texts are counted no further."""

_NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
"""Keywords whose values are schemas by names."""
_UNBOUND = ("default", "examples")
"""Keywords whose values say nothing about an answer."""
_LABELS = ("binary", "password", "path", "file-path", "directory-path", "new-path")
"""Formats that any text has, which pydantic and OpenAPI write; the grammar knows none of them."""
_VALUES = ("const", "enum")
_LOWER = ("minimum", "exclusiveMinimum")
_UPPER = ("maximum", "exclusiveMaximum")
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_FIT = f"with up to 15 digits and {_POWERS} decimal places"
_CHOICES = {"multipleOf": f"one above 0 and below {_EXACT} {_FIT}"} | dict.fromkeys(
    _LENGTHS, f"one up to {_LONGEST}"
)
"""Numbers that may stand there; for other keywords one that is not as large, or not as long."""


def with_kept_numbers(schema: dict[str, Any], param: str, *, lenient: bool) -> dict[str, Any]:
    """A copy of a schema that an answer fits only where it fits the schema, for a reader with such floats.

    Formats that bind nothing are left out.

    `lenient` leaves keywords out whose numbers such a reader would take for others; otherwise ImpossibleCall
    is raised, with the place of the number.
    """
    kept = copy.deepcopy(schema)
    for part, keyword, path in [*_places(kept)]:
        value = part[keyword]
        if keyword == "format" and value in _LABELS:
            del part[keyword]
            continue
        if _is_beyond(keyword, value):
            part[keyword] = _FARTHEST if keyword in _UPPER else -_FARTHEST
            continue
        loose = next((each for each in _numbers(value) if not _is_kept(keyword, each)), None)
        if loose is None:
            continue
        if lenient:
            del part[keyword]
            continue
        other = _CHOICES.get(keyword, f"a number within ±{_EXACT - 1} {_FIT}")
        raise ImpossibleCall(
            f"answers cannot be held to the schema's {path}, which is {loose!r:.40}; choose {other}, or "
            "leave it out",
            param=param,
        )
    return kept


def _places(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Each schema in a schema with a keyword that is none, and where that is: `anyOf[1].const`."""
    pending: list[tuple[Any, str]] = [(schema, "")]
    while pending:
        part, path = pending.pop()
        if isinstance(part, list):
            pending += [(each, f"{path}[{index}]") for index, each in enumerate(part)]
        if not isinstance(part, dict):
            continue
        for keyword, value in part.items():
            at = f"{path}.{keyword}" if path else keyword
            if keyword in _NAMED and isinstance(value, dict):
                pending += [(each, f"{at}.{name}") for name, each in value.items()]
            elif isinstance(value, dict | list) and keyword not in (*_VALUES, *_UNBOUND):
                pending.append((value, at))
            elif keyword not in _UNBOUND:
                yield part, keyword, at


def _numbers(value: Any) -> Iterator[int | float]:
    """The numbers in a value of JSON."""
    pending = [value]
    while pending:
        part = pending.pop()
        if isinstance(part, dict | list):
            pending += part.values() if isinstance(part, dict) else part
        elif isinstance(part, int | float) and not isinstance(part, bool):
            yield part


def _is_beyond(keyword: str, value: Any) -> bool:
    """Whether it is a bound that all whole numbers of 64 bits keep."""
    if not isinstance(value, int | float) or value in (math.inf, -math.inf):
        return False
    return (keyword in _LOWER and value < -_LARGEST) or (keyword in _UPPER and value >= _LARGEST)


def _is_kept(keyword: str, value: int | float) -> bool:
    """Whether no answer can be on the wrong side of a number, or another one than it."""
    if isinstance(value, float) and not math.isfinite(value):
        return False
    if keyword == "multipleOf":
        return 0 < value < _EXACT and _is_read(value)
    if keyword in _LENGTHS:
        return value <= _LONGEST
    if keyword not in (*_LOWER, *_UPPER, *_VALUES):
        return True
    most = _LARGEST if isinstance(value, int) and not keyword.startswith("exclusive") else _EXACT - 1
    return abs(value) <= most and _is_read(value)


def _is_read(value: int | float) -> bool:
    """Whether llguidance reads a number as it is: it divides digits, as a float, by a power of ten."""
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    whole = int("".join(map(str, digits)))
    return float(whole) == whole and isinstance(exponent, int) and abs(exponent) <= _POWERS
