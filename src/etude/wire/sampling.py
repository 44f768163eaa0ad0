"""Changing how to sample, with every value checked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etude.core.call import Sampling
from etude.core.errors import RequestError

SAMPLING_NAMES = ("temperature", "top_p", "max_tokens", "stop", "seed")


def change_sampling(base: Sampling, changes: Mapping[str, Any]) -> Sampling:
    """`base` with the given fields of `Sampling` changed. None leaves a field as it is.

    Raises RequestError for an unknown name or an impossible value.
    """
    given = {name: _check(name, value) for name, value in changes.items() if value is not None}
    return replace(base, **given) if given else base


def _check(name: str, value: Any) -> Any:
    """The value as `Sampling` keeps it."""
    match name:
        case "temperature":
            return _number(name, value, low=0.0, high=math.inf)
        case "top_p":
            return _number(name, value, low=0.0, high=1.0, low_included=False)
        case "max_tokens":
            if not _is_int(value) or value < 1:
                raise RequestError(f"max_tokens must be an integer of at least 1, found {value!r}")
            return value
        case "seed":
            if not _is_int(value):
                raise RequestError(f"seed must be an integer, found {value!r}")
            return value
        case "stop":
            stops = (value,) if isinstance(value, str) else tuple(value) if _is_list(value) else None
            if stops is None or not all(isinstance(stop, str) and stop for stop in stops):
                raise RequestError(f"stop must be a text or a list of texts, found {value!r}")
            return stops
        case _:
            raise RequestError(f"'{name}' is not a sampling parameter; allowed: {', '.join(SAMPLING_NAMES)}")


def _number(name: str, value: Any, *, low: float, high: float, low_included: bool = True) -> float:
    in_range = (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and (low <= value if low_included else low < value)
        and value <= high
    )
    if not in_range:
        bound = f"{'at least' if low_included else 'more than'} {low:g}"
        bound += "" if high == math.inf else f" and at most {high:g}"
        raise RequestError(f"{name} must be a number of {bound}, found {value!r}")
    return float(value)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)
