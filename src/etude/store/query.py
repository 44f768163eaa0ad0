"""The words that filter episodes: one language, for `etude episodes` and for the view.

failed  -cut-off  reward<0.5  correct=1  agent:solver  version>3  "twelve apples"
"""

from __future__ import annotations

import json
import operator
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from etude.config.nearest import nearest
from etude.core.errors import RequestError
from etude.store.journal import Journal
from etude.store.outline import EpisodeOutline, outlines, strings_in

Test: TypeAlias = Callable[[EpisodeOutline], bool]

FLAGS: Mapping[str, Test] = {
    "failed": lambda episode: episode.failure is not None,
    "cut-off": lambda episode: episode.cut_off > 0,
    "drifted": lambda episode: episode.drifted > 0,
    "retried": lambda episode: episode.retries > 0,
    "unscored": lambda episode: episode.reward is None,
}
"""Words that stand alone; with a dash before it a word means the others."""

NUMBERS: Mapping[str, Callable[[EpisodeOutline], float | None]] = {
    "reward": lambda episode: episode.reward,
    "calls": lambda episode: episode.calls,
    "tokens": lambda episode: episode.tokens,
    "seconds": lambda episode: episode.seconds,
    "retries": lambda episode: episode.retries,
    "generation": lambda episode: episode.generation,
}
"""Names that are compared, as in `reward<0.5`; any other name is an evaluator's."""

_FIELDS: Mapping[str, Callable[[EpisodeOutline], set[str]]] = {
    "agent": lambda episode: episode.agents,
    "example": lambda episode: {episode.example},
    "failed": lambda episode: set() if episode.failure is None else {episode.failure.kind},
}
"""Names that are looked up, as in `agent:solver`."""

_COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq
}  # fmt: skip
_COMPARISON = re.compile(r"([^<>=:\"]+)(<=|>=|<|>|=)(-?[\d.eE+-]+)")

WORDS = (
    "failed, failed:timeout, cut-off, drifted, retried, unscored; reward<0.5, an evaluator's name likewise, "
    "calls, tokens, seconds, version; agent:NAME, example:ID; any other word is looked for in the text. "
    "A dash before a word means the others"
)
"""The language in a sentence, for help."""


@dataclass(frozen=True, slots=True)
class Query:
    """The episodes that are looked for."""

    words: str = ""
    tests: tuple[Test, ...] = ()
    texts: tuple[str, ...] = ()
    """That must all be found in what was said, whatever the case."""

    def __bool__(self) -> bool:
        return bool(self.tests or self.texts)

    def fits(self, episode: EpisodeOutline) -> bool:
        """Whether an episode is looked for."""
        return all(test(episode) for test in self.tests) and all(_says(episode, each) for each in self.texts)


def parse_query(words: str) -> Query:
    """The query of a line of words. Raises RequestError for what cannot be meant."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise RequestError(f"the filter {words!r} has a quotation mark without its second") from error
    tests: list[Test] = []
    texts: list[str] = []
    for part in parts:
        negated = part.startswith("-") and len(part) > 1
        test = _test(part[negated:])
        if test is not None:
            tests.append(_other(test) if negated else test)
        else:
            texts.append(part.removeprefix("text:").lower())
    return Query(words.strip(), tuple(tests), tuple(texts))


def _test(word: str) -> Test | None:
    """The test that a word is; None for a word to look for."""
    if word in FLAGS:
        return FLAGS[word]
    name, colon, value = word.partition(":")
    if colon and name in ("version", "v"):
        return _version(operator.eq, value)
    if colon and name in _FIELDS:
        field = _FIELDS[name]
        return lambda episode: value in field(episode)
    if match := _COMPARISON.fullmatch(word):
        name, sign, shown = match.groups()
        if name == "version":
            return _version(_COMPARE[sign], shown)
        limit = _number(word, shown)
        return lambda episode: _compared(episode, name, _COMPARE[sign], limit)
    if re.fullmatch(r"\S+(<|>|=)\S*", word):
        known = nearest(word, [*NUMBERS, *FLAGS]) or "reward"
        raise RequestError(f"the filter word '{word}' compares with no number; write it as in {known}<0.5")
    return None


def _compared(
    episode: EpisodeOutline, name: str, compare: Callable[[float, float], bool], limit: float
) -> bool:
    value = NUMBERS[name](episode) if name in NUMBERS else episode.scores.get(name)
    return value is not None and compare(value, limit)


def _version(compare: Callable[[float, float], bool], shown: str) -> Test:
    number = _number(f"version:{shown}", shown.removeprefix("v"))
    return lambda episode: any(compare(version, number) for version in episode.versions)


def _number(word: str, shown: str) -> float:
    try:
        return float(shown)
    except ValueError as error:
        raise RequestError(f"the filter word '{word}' needs a number, and '{shown}' is none") from error


def _other(test: Test) -> Test:
    return lambda episode: not test(episode)


def _says(episode: EpisodeOutline, text: str) -> bool:
    """Whether a text is among what was said. The stored JSON is looked at first, which is quick."""
    escaped = json.dumps(text)[1:-1].lower()
    return any(
        text in said.lower()
        for row in episode.text
        if escaped in row.lower()
        for said in strings_in(json.loads(row))
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """Episodes that were found, and where to look on."""

    episodes: list[EpisodeOutline]
    looked_at: int
    """Episodes that were looked at for them."""
    phase: str | None = None
    """Where there may be more, with `after`; None where all is said."""
    after: str = ""


def find_episodes(
    journal: Journal,
    phases: Sequence[str],
    reward: str | None,
    query: Query,
    *,
    after: str = "",
    limit: int | None = None,
    seconds: float | None = None,
) -> Selection:
    """The episodes of phases that a query fits, phase by phase in the order of their ids.

    Begins in the first of the `phases`, `after` an id. Stops when there are `limit` of them, or when it has
    looked for so many `seconds`.
    """
    episodes: list[EpisodeOutline] = []
    begun, looked = time.monotonic(), 0
    for phase in phases:
        for episode in outlines(journal, f"{phase}/", reward, after=after, with_text=bool(query.texts)):
            looked += 1
            if query.fits(episode):
                episodes.append(episode)
            is_late = seconds is not None and time.monotonic() - begun > seconds
            if is_late or (limit is not None and len(episodes) >= limit):
                return Selection(episodes, looked, phase, episode.id)
        after = ""
    return Selection(episodes, looked)
