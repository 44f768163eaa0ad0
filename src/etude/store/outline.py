"""Outlines of episodes, for long lists: they are read without decoding the calls. Also the query language."""

import json
import operator
import re
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args, get_type_hints

from etude.config.document import strings
from etude.core.episode import Failure
from etude.core.errors import RequestError, alternatives
from etude.core.json_text import jsonable
from etude.store.episodes import episode_phase, stored_episodes
from etude.store.journal import Journal, Json


@dataclass(slots=True)
class EpisodeOutline:
    """A finished episode, as a list shows it."""

    id: str
    phase: str
    example: str
    generation: int
    inputs: Mapping[str, Any]
    expected: Any
    output: Any
    failure: Failure | None
    seconds: float
    reward: float | None = None
    """The score of the evaluator that is the reward."""
    scores: dict[str, float | None] = field(default_factory=dict)
    """Scores by evaluator; None if it failed."""
    errors: dict[str, str] = field(default_factory=dict)
    """The errors of evaluators and calls, by `score:NAME` and `call:NUMBER`."""
    calls: int = 0
    cut_off: int = 0
    """How many answers ended at the token limit."""
    drifted: int = 0
    """How many prompts began a new branch because a template changed earlier text."""
    retries: int = 0
    agents: set[str] = field(default_factory=set)
    """The functions that called a model."""
    versions: set[int] = field(default_factory=set)
    """The versions of the weights that answered."""
    tokens: int = 0
    """How many tokens were sampled."""
    stored: list[Json] = field(default_factory=list)
    """All stored values of the episode, if they were asked for."""


def first_question(inputs: Mapping[str, Any]) -> Any:
    """Return the first input of an example. If that is a conversation, return its last message."""
    first = next(iter(inputs.values()), "")
    if isinstance(first, list) and first and isinstance(first[-1], dict):
        return first[-1].get("content") or first
    return first


def in_one_line(value: Any, most: int = 160) -> str:
    """Return the beginning of a value in one line, for a list. Anything but text is written as JSON.

    A dot replaces each sign that would move the cursor of a terminal or change its colours.
    """
    text = value if isinstance(value, str) else json.dumps(jsonable(value), ensure_ascii=False)
    text = "".join(sign if sign.isprintable() else "·" for sign in " ".join(text.split()))
    return text if len(text) <= most else text[: most - 1] + "…"


def outlines(
    journal: Journal, prefix: str, reward: str | None, *, after: str = "", with_text: bool = False
) -> Iterator[EpisodeOutline]:
    """Yield the episodes whose ids start with a prefix that ends in a slash, in the order of ids.

    `after` is an episode id: begin after it. `reward` is the evaluator whose score is the reward.
    """
    for id, stored in stored_episodes(journal, prefix, after=after):
        # The rows of another episode may begin like this one's: an example may have any name.
        kinds = tuple(f"{id}/{kind}/" for kind in ("call", "score", "tool"))
        rows = {key: row for key, row in journal.scan(f"{id}/") if key.startswith(kinds)}
        # Calls that failed for good are stored in the episode itself.
        failed = [call for call in stored["calls"] if isinstance(call, dict)]
        calls = [*failed, *(row for key, row in rows.items() if key.startswith(kinds[0]))]
        answers = [call["completion"] for call in calls if call.get("completion") is not None]
        sampled = [call for call in calls if call.get("completion") is not None and not call.get("logged")]
        scores = {key.removeprefix(kinds[1]): row for key, row in rows.items() if key.startswith(kinds[1])}
        errors = {f"call:{call['index']}": call["error"] for call in failed if call.get("error")}
        example = stored["example"]
        yield EpisodeOutline(
            id=stored["episode"],
            phase=episode_phase(stored),
            example=example["id"],
            generation=stored["generation"],
            inputs=example.get("inputs") or {},
            expected=example.get("expected"),
            output=stored["output"],
            failure=None if stored["failure"] is None else Failure(*stored["failure"]),
            seconds=stored["seconds"],
            reward=scores[reward]["score"] if reward in scores else None,
            scores={name: row["score"] for name, row in scores.items()},
            errors=errors | {f"score:{name}": row["error"] for name, row in scores.items() if row["error"]},
            calls=len(stored["calls"]),
            cut_off=sum(answer.get("finish_reason") == "length" for answer in answers),
            drifted=sum(answer.get("drifted", False) for answer in answers),
            retries=sum(sum(call.get("retried", {}).values()) for call in calls),
            agents={call["function"] for call in calls},
            versions={call["completion"].get("model_version", 0) for call in sampled},
            tokens=sum(answer["usage"][1] for answer in answers),
            stored=[stored, *rows.values()] if with_text else [],
        )


_UNREAD = {"prompt_ids", "completion_ids", "logprobs", "role", "type", "id", "finish_reason"}
"""The keys of packed numbers and of words that no person would read."""

Test: TypeAlias = Callable[[EpisodeOutline], bool]

_FACTS: Mapping[str, Callable[[EpisodeOutline], Iterable[Any]]] = {
    "failed": lambda episode: () if episode.failure is None else (episode.failure.kind,),
    "cut-off": lambda episode: (episode.cut_off,),
    "drifted": lambda episode: (episode.drifted,),
    "retried": lambda episode: (episode.retries,),
    "unscored": lambda episode: (episode.reward is None,),
    "reward": lambda episode: (episode.reward,),
    "calls": lambda episode: (episode.calls,),
    "tokens": lambda episode: (episode.tokens,),
    "seconds": lambda episode: (episode.seconds,),
    "generation": lambda episode: (episode.generation,),
    "version": lambda episode: episode.versions,
    "agent": lambda episode: episode.agents,
    "example": lambda episode: (episode.example,),
}
"""The values that words are about, as in `reward<0.5` and `agent:solver`. Other names are evaluators'."""

_FLAGS = ("failed", "cut-off", "drifted", "retried", "unscored")
"""Names that stand alone. A dash before any word negates it."""

_TEXTS = ("failed", "agent", "example")

_COMPARE = {
    "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "=": operator.eq
}  # fmt: skip
_COMPARISON = re.compile(r"([^<>=:\"\s]+)(<=|>=|<|>|=)(\S*)")
_LONE_COMPARISON = re.compile(r"[<>=]+[-+.\d]*")

WORDS = (
    "failed, failed:timeout, cut-off, drifted, retried, unscored; reward<0.5, also with an evaluator's name, "
    "calls, tokens, seconds or version; agent:NAME, example:ID; any other word is searched in the text. "
    "A dash before a word excludes what it finds"
)
"""The query language in a sentence, for help."""


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed query for episodes."""

    words: str = ""
    tests: tuple[tuple[Test, bool], ...] = ()
    texts: tuple[str, ...] = ()
    """Texts that an episode must all contain, whatever the case."""
    evaluators: tuple[str, ...] = ()
    """The evaluators whose scores it compares."""

    def fits(self, episode: EpisodeOutline) -> bool:
        """Return whether an episode matches."""
        if not all(bool(test(episode)) is wanted for test, wanted in self.tests):
            return False
        found = strings(episode.stored) if self.texts else ()
        said = [text.lower() for path, text in found if not _UNREAD.intersection(path)]
        return all(any(text in each for each in said) for text in self.texts)


def parse_query(words: str) -> Query:
    """Parse a line of words. Raises RequestError for words that cannot be understood."""
    try:
        parts = shlex.split(words)
    except ValueError as error:
        raise RequestError(f"the filter {words!r} has a quotation mark that is not closed") from error
    tests: list[tuple[Test, bool]] = []
    texts: list[str] = []
    evaluators: list[str] = []
    for part in parts:
        if _LONE_COMPARISON.fullmatch(part):
            raise RequestError(f"the filter word '{part}' compares nothing; write reward<0.5 without blanks")
        negated = part.startswith("-") and len(part) > 1
        test = _test(part[negated:])
        if test is not None:
            tests.append((test, not negated))
            compared = _COMPARISON.fullmatch(part[negated:])
            evaluators += [compared[1]] if compared and compared[1] not in _FACTS else []
        else:
            texts.append(part.removeprefix("text:").lower())
    return Query(words.strip(), tuple(tests), tuple(texts), tuple(evaluators))


def _test(word: str) -> Test | None:
    """Return the test that a word stands for, or None if the word is a text to search for."""
    if word in _FLAGS:
        return lambda episode: any(_FACTS[word](episode))
    name, colon, value = word.partition(":")
    kinds = get_args(get_type_hints(Failure)["kind"])
    if colon and name == "failed" and value not in kinds:
        raise RequestError(f"no episode fails by '{value}'{alternatives(value, kinds)}")
    if colon and name in _TEXTS:
        return lambda episode: value in _FACTS[name](episode)
    if colon and name in _FACTS:
        word = f"{name}={value}"
    if (match := _COMPARISON.fullmatch(word)) is None:
        return None
    name, sign, value = match.groups()
    if name in _TEXTS:
        raise RequestError(f"the filter word '{word}' compares text; write {name}:{value}")
    facts = _FACTS.get(name) or (lambda episode: (episode.scores.get(name),))
    compare = _COMPARE[sign]
    try:
        limit = float(value)
    except ValueError as error:
        raise RequestError(f"the filter word '{word}' needs a number, as in reward<0.5") from error
    return lambda episode: any(
        isinstance(each, int | float) and compare(each, limit) for each in facts(episode)
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """The episodes found, and where to continue."""

    episodes: list[EpisodeOutline]
    looked_at: int
    """How many episodes were checked."""
    phase: str | None = None
    """The phase to continue in, with `after`. None if all episodes were checked."""
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
    """Return the episodes of the phases that match a query, phase by phase in the order of ids.

    Begins in the first of the `phases`, after the id `after`. Stops after `limit` matches or about `seconds`
    seconds. Raises RequestError if all were looked at, and the query compares a score that none has.
    """
    episodes: list[EpisodeOutline] = []
    scores: set[str] = set()
    begun, looked, is_whole = time.monotonic(), 0, not after
    for phase in phases:
        for episode in outlines(journal, f"{phase}/", reward, after=after, with_text=bool(query.texts)):
            looked += 1
            scores.update(episode.scores)
            if query.fits(episode):
                episodes.append(episode)
            is_late = seconds is not None and time.monotonic() - begun > seconds
            if is_late or (limit is not None and len(episodes) >= limit):
                return Selection(episodes, looked, phase, episode.id)
        after = ""
    unknown = next((name for name in query.evaluators if name not in scores), None)
    if unknown is not None and looked and is_whole:
        hint = alternatives(unknown, sorted({*_FACTS, *scores}.difference(_FLAGS, _TEXTS)))
        raise RequestError(f"none of the {looked} episodes has a score '{unknown}'{hint}")
    return Selection(episodes, looked)
