"""Episodes in outline, for lists of many: what is said of each without decoding its calls.

SQLite finds the parts of the stored JSON, so that a list of thousands is read in a moment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.core.episode import Failure
from etude.store.episodes import latest_first, phase_of
from etude.store.journal import Journal, Json

_IS_EPISODE = "substr(value, 1, 12) = '{\"episode\": '"
"""As `encode_episode` begins. Nothing else in a journal does."""
_NEXT = f"SELECT key, value FROM steps WHERE key >= ? AND {_IS_EPISODE} ORDER BY key LIMIT 1"
_PARTS = (
    *("episode", "example", "generation", "calls", "output", "failure", "seconds", "score", "error"),
    *("function", "retried", "logged", "completion.finish_reason", "completion.drifted"),
    *("completion.model_version", "completion.usage"),
)
_COLUMNS = ", ".join(f"'$.{part}'" for part in _PARTS)
_OUTLINE = f"CASE WHEN json_valid(value) THEN json_extract(value, {_COLUMNS}) ELSE value END"
"""Python writes numbers that are not finite, and SQLite has none in JSON: such a value is read whole."""
_PAGE = 512


@dataclass(slots=True)
class EpisodeOutline:
    """A finished episode, as a list has it."""

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
    """Its score by the evaluator that is the reward."""
    scores: dict[str, float | None] = field(default_factory=dict)
    """By evaluator; None where it failed."""
    errors: dict[str, str] = field(default_factory=dict)
    """Why evaluators failed, and calls: by `score:NAME` and `call:NUMBER`."""
    calls: int = 0
    cut_off: int = 0
    """Answers that ended at the limit of tokens."""
    drifted: int = 0
    """Prompts that a template wrote otherwise than before, so that a new branch began."""
    retries: int = 0
    agents: set[str] = field(default_factory=set)
    """The functions that called a model."""
    versions: set[int] = field(default_factory=set)
    """Of the weights that answered."""
    tokens: int = 0
    """That were sampled."""
    text: list[str] = field(default_factory=list)
    """All that was stored of it, where it was asked for, as JSON."""


def question_of(inputs: Mapping[str, Any]) -> Any:
    """The first input of an example; of a conversation its last message."""
    first = next(iter(inputs.values()), "")
    if isinstance(first, list) and first and isinstance(first[-1], dict):
        return first[-1].get("content") or first
    return first


def phases_in(journal: Journal) -> list[str]:
    """As `phases_of`, by looking at one episode of each phase."""
    phases: list[str] = []
    first = ""
    while rows := journal.select(_NEXT, (first,)):
        phases.append(phase_of(json.loads(rows[0][1])))
        first = f"{phases[-1]}0"  # The first key after all that begin with the phase and a slash.
    return sorted(phases, key=latest_first)


def outlines(
    journal: Journal, prefix: str, reward: str | None, *, after: str = "", with_text: bool = False
) -> Iterator[EpisodeOutline]:
    """The episodes whose ids start with a prefix that ends in a slash, in the order of their ids.

    `after` is the id of an episode: those that come after it. `reward` is the evaluator whose score is the
    reward.
    """
    opened: list[EpisodeOutline] = []
    for key, stored, text in _parts(journal, prefix, after, with_text=with_text):
        # The rows of an episode come after it, and before the next one but for those within its own id.
        while opened and not key.startswith(f"{opened[-1].id}/"):
            yield opened.pop()
        if stored["episode"] == key:
            if after and key <= after:
                continue
            opened.append(_begin(stored))
        elif opened:
            _add(opened[-1], key.removeprefix(f"{opened[-1].id}/"), stored, reward)
        if opened and text:
            opened[-1].text.append(text)
    yield from reversed(opened)


def _parts(
    journal: Journal, prefix: str, after: str, *, with_text: bool
) -> Iterator[tuple[str, dict[str, Json], str | None]]:
    columns = f"key, {_OUTLINE}, json_valid(value), {'value' if with_text else 'NULL'}"
    where = "key >= ? AND key < ?"
    statement = f"SELECT {columns} FROM steps WHERE {where} ORDER BY key LIMIT {_PAGE}"
    # "0" comes after the slash: rows of the episode that was last are passed over.
    first, end = (f"{after}0" if after else prefix), f"{prefix[:-1]}0"
    while True:
        rows = journal.select(statement, (first, end))
        for key, value, is_outline, whole in rows:
            data = json.loads(value)
            parts = dict(zip(_PARTS, data, strict=True)) if is_outline else _parts_of(data)
            yield key, parts, whole
        if len(rows) < _PAGE:
            return
        first = rows[-1][0] + "\0"


def _parts_of(value: Json) -> dict[str, Json]:
    parts: dict[str, Json] = {}
    for name in _PARTS:
        part = value
        for step in name.split("."):
            part = part.get(step) if isinstance(part, dict) else None
        parts[name] = part
    return parts


def _begin(stored: Mapping[str, Json]) -> EpisodeOutline:
    example = stored["example"]
    outline = EpisodeOutline(
        id=stored["episode"],
        phase=phase_of(stored),
        example=example["id"],
        generation=stored["generation"],
        inputs=example.get("inputs") or {},
        expected=example.get("expected"),
        output=stored["output"],
        failure=None if stored["failure"] is None else Failure(*stored["failure"]),
        seconds=stored["seconds"],
        calls=len(stored["calls"]),
    )
    # Calls that failed for good are in the episode itself.
    for call in stored["calls"]:
        if isinstance(call, dict):
            _add_call(outline, _parts_of(call))
            if call.get("error"):
                outline.errors[f"call:{call['index']}"] = call["error"]
    return outline


def _add(outline: EpisodeOutline, name: str, stored: Mapping[str, Json], reward: str | None) -> None:
    kind, _, rest = name.partition("/")
    if kind == "call":
        _add_call(outline, stored)
    elif kind == "score":
        outline.scores[rest] = stored["score"]
        if stored["error"]:
            outline.errors[f"score:{rest}"] = stored["error"]
        if rest == reward:
            outline.reward = stored["score"]


def _add_call(outline: EpisodeOutline, stored: Mapping[str, Json]) -> None:
    outline.agents.add(stored["function"])
    outline.retries += sum((stored["retried"] or {}).values())
    if stored["completion.model_version"] is not None:
        if not stored["logged"]:
            outline.versions.add(stored["completion.model_version"])
        outline.cut_off += stored["completion.finish_reason"] == "length"
        outline.drifted += bool(stored["completion.drifted"])
        outline.tokens += stored["completion.usage"][1]


def strings_in(value: Json) -> Iterator[str]:
    """All texts in a stored value that a person would read: no packed numbers, no names of fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name not in _PACKED:
                yield from strings_in(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from strings_in(inner)


_PACKED = {
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "prompt_logprobs",
    "role",
    "type",
    "id",
    "finish_reason",
}
