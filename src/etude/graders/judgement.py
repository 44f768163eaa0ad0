"""The form of a judge's answer: in words, as the schema that it is held to, and its score."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from etude.core.call import Constraint
from etude.graders.spec import JudgeGrader, LabelModelGrader, ScoreModelGrader
from etude.rewards.judge import MalformedAnswer

_REASONING = {"type": "string", "pattern": "^[^\\n]{0,600}$"}
"""Bounded: a small model that is held to a schema may find no end of a text."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a judge is to answer."""

    words: str
    constraint: Constraint
    score: Callable[[Mapping[str, Any]], float]
    """The score of an answer, which an endpoint may not have held to the schema. Raises MalformedAnswer."""


def judgement_of(spec: JudgeGrader) -> Judgement:
    """The answers that a grader asks its judge for."""
    match spec:
        case ScoreModelGrader(range=(low, high)):

            def score(answer: Mapping[str, Any]) -> float:
                value = answer.get("score")
                if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                    raise MalformedAnswer(f"its score is {value!r}, not a number from {low:g} to {high:g}")
                return float(value)

            words, schema = (
                f"number from {low:g} to {high:g}",
                {"type": "number", "minimum": low, "maximum": high},
            )
            return _judgement("score", words, schema, score)
        case LabelModelGrader(labels=labels, passing_labels=passing):

            def passes(answer: Mapping[str, Any]) -> float:
                label = answer.get("label")
                if label not in labels:
                    raise MalformedAnswer(f"its label is {label!r}, and not one of {', '.join(labels)}")
                return float(label in passing)

            return _judgement("label", " or ".join(map(json.dumps, labels)), {"enum": [*labels]}, passes)
    raise TypeError(f"{type(spec).__name__} asks no judge")


def _judgement(
    name: str, words: str, schema: Mapping[str, Any], score: Callable[[Mapping[str, Any]], float]
) -> Judgement:
    """The reasoning comes first, so that the verdict can follow from it."""
    properties = {"reasoning": _REASONING, name: schema}
    whole = {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }
    shown = f'{{"reasoning": "one or two sentences", "{name}": {words}}}'
    return Judgement(shown, Constraint("json_schema", json.dumps(whole)), score)
