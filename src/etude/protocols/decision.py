"""Decisions, and the scales on which agents give them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Literal, TypeAlias

from etude.core.errors import RequestError, alternatives

Verdict: TypeAlias = Literal[0, 1]
"""0 is reject, 1 is accept."""

REJECT: Verdict = 0
ACCEPT: Verdict = 1

VERDICTS: tuple[Verdict, Verdict] = (REJECT, ACCEPT)
WORDS = {REJECT: "reject", ACCEPT: "accept"}
"""The word for each verdict."""


def sign(verdict: Verdict) -> int:
    """Return 1 for accept, -1 for reject."""
    return 1 if verdict == ACCEPT else -1


def shown_decision(decision: float) -> str:
    """Return a decision in words, with its number: `accept (0.5)`."""
    word = "accept" if decision > 0 else "reject" if decision < 0 else "neither"
    return f"{word} ({decision:g})"


@dataclass(frozen=True, slots=True)
class Scale:
    """The answers that count as a decision. Each option is a text and a value from -1 (reject) to 1."""

    name: str
    options: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        """Check the options. Raises RequestError for equal texts, upper case, and values out of order."""
        texts = [text for text, _ in self.options]
        values = [value for _, value in self.options]
        if len(set(texts)) != len(texts) or any(not text or text != text.strip().lower() for text in texts):
            raise RequestError(
                f"scale '{self.name}': the texts must be distinct and in lower case, found {texts}"
            )
        rising = all(low < high for low, high in pairwise(values))
        if not rising or len(values) < 2 or not -1 <= values[0] < 0 < values[-1] <= 1:
            raise RequestError(
                f"scale '{self.name}': the values must rise from reject to accept within [-1, 1]: {values}"
            )

    @property
    def texts(self) -> tuple[str, ...]:
        """The texts, from reject to accept."""
        return tuple(text for text, _ in self.options)

    @property
    def values(self) -> tuple[float, ...]:
        """The values, from reject to accept."""
        return tuple(value for _, value in self.options)

    def strongest(self, verdict: Verdict) -> str:
        """Return the option text that accepts or rejects most strongly."""
        return self.options[-1 if verdict == ACCEPT else 0][0]

    def read(self, text: str) -> float | None:
        """Return the value of the option that the text starts with, or None.

        Case, quotes and emphasis do not matter. `7/10` is 7. An echo such as `accept or reject?` is not a
        decision, nor is a range such as `7-8`, or `8%` where the scale does not end at 100.
        """
        answer = text.lstrip(_MARKS).lower()
        for option, value in sorted(self.options, key=lambda option: -len(option[0])):
            rest = answer[len(option) :]
            if answer.startswith(option) and not _GOES_ON.match(rest):
                out_of = _OUT_OF.match(rest)
                return value if out_of is None or (out_of[1] or "100") == self.texts[-1] else None
        return None


_MARKS = " \t\r\n*_`\"'“”:"
_GOES_ON = re.compile(r"\w|[.,]\d|\s*[/|]\s*[a-z]|\s*[-–]\s*\d|\s+or\b")
_OUT_OF = re.compile(r"\s*(?:(?:/|out of)\s*(\d+)|%)")

_DISAGREE = (("strongly disagree", -1.0),)
_AGREE = (("strongly agree", 1.0),)
_THIRDS = (("disagree", -2 / 3), ("somewhat disagree", -1 / 3)), (("somewhat agree", 1 / 3), ("agree", 2 / 3))
_UNSURE = (("neither agree nor disagree", 0.0),)

ACCEPT_REJECT = Scale("accept_reject", (("reject", -1.0), ("accept", 1.0)))


def _whole_numbers(most: int, name: str) -> Scale:
    """Return the scale of whole numbers from 0 to `most`, with `most / 2` for neither."""
    return Scale(name, tuple((str(number), 2 * number / most - 1) for number in range(most + 1)))


SCALES: Mapping[str, Scale] = MappingProxyType(
    {
        scale.name: scale
        for scale in (
            ACCEPT_REJECT,
            Scale("accept_reject_neither", (("reject", -1.0), ("neither", 0.0), ("accept", 1.0))),
            Scale("likert_scale_4", (*_DISAGREE, ("disagree", -0.5), ("agree", 0.5), *_AGREE)),
            Scale("likert_scale_5", (*_DISAGREE, ("disagree", -0.5), *_UNSURE, ("agree", 0.5), *_AGREE)),
            Scale("likert_scale_6", (*_DISAGREE, *_THIRDS[0], *_THIRDS[1], *_AGREE)),
            Scale("likert_scale_7", (*_DISAGREE, *_THIRDS[0], *_UNSURE, *_THIRDS[1], *_AGREE)),
            _whole_numbers(10, "likert_int_scale_11"),
            _whole_numbers(10, "out_of_10"),
            _whole_numbers(100, "out_of_100"),
        )
    }
)


def find_scale(name: str) -> Scale:
    """Return the scale with this name. Raises RequestError for an unknown name, with the nearest one."""
    if name not in SCALES:
        raise RequestError(f"there is no decision scale '{name}'" + alternatives(name, SCALES))
    return SCALES[name]
