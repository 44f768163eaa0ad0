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
    given = {name: _checked(name, value) for name, value in changes.items() if value is not None}
    return replace(base, **given) if given else base


def _checked(name: str, value: Any) -> Any:
    """The value as `Sampling` keeps it."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    number = integer or (isinstance(value, float) and math.isfinite(value))
    match name:
        case "temperature":
            wanted, valid = "a number of at least 0", number and value >= 0
        case "top_p":
            wanted, valid = "a number of more than 0 and at most 1", number and 0 < value <= 1
        case "max_tokens":
            wanted, valid = "an integer of at least 1", integer and value >= 1
        case "seed":
            wanted, valid = "an integer", integer
        case "stop":
            wanted = "a text or a list of texts"
            value = (value,) if isinstance(value, str) else value
            valid = isinstance(value, list | tuple) and all(isinstance(t, str) and t for t in value)
        case _:
            raise RequestError(f"'{name}' is not a sampling parameter; allowed: {', '.join(SAMPLING_NAMES)}")
    if not valid:
        raise RequestError(f"{name} must be {wanted}, found {value!r}")
    if name == "stop":
        return tuple(value)
    return float(value) if name in ("temperature", "top_p") else value
