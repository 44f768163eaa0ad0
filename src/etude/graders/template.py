"""Template strings of graders: `{{ item.answer }}` and `{{ sample.output_text }}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator

from etude.core.errors import EtudeError

_PATH = re.compile(r"(item|sample)((?:\.\w+|\[\d+\])*)")
_STEP = re.compile(r"\w+")

Problem: TypeAlias = Literal[
    "formula_parse_error",
    "invalid_variable_error",
    "model_grader_parse_error",
    "model_grader_server_error",
    "other_error",
    "python_grader_runtime_error",
    "python_grader_server_error",
    "sample_parse_error",
]
"""Why there is no score, in OpenAI's words."""


class GraderError(EtudeError):
    """A grader has no score for an answer."""

    def __init__(self, problem: Problem, message: str) -> None:
        super().__init__(message)
        self.problem = problem


def _checked(text: str) -> str:
    for hole in _parts(text)[1::2]:
        if not _PATH.fullmatch(hole.strip()):
            raise ValueError(
                f"'{{{{{hole}}}}}' is no variable; allowed are those like {{{{ item.answer }}}} and "
                "{{ sample.output_text }}"
            )
    return text


Template: TypeAlias = Annotated[str, AfterValidator(_checked)]
"""A text with variables."""


def rendered(text: str, values: Mapping[str, Any]) -> str:
    """The text with its variables filled in; what is not text is written as JSON.

    `values` has `item` and `sample`. Raises GraderError for a variable that is not there.
    """
    parts = _parts(text)
    parts[1::2] = [_text(_at(hole.strip(), values)) for hole in parts[1::2]]
    return "".join(parts)


def _parts(text: str) -> list[str]:
    """The text between holes and what is in them, in turn. It takes time in proportion to its length."""
    parts, position = [], 0
    while (start := text.find("{{", position)) >= 0 and (end := text.find("}}", start + 2)) >= 0:
        parts += [text[position:start], text[start + 2 : end]]
        position = end + 2
    return [*parts, text[position:]]


def _at(path: str, values: Mapping[str, Any]) -> Any:
    value: Any = values
    for step in _STEP.findall(path):
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            unread = path.startswith("sample.output_json") and values["sample"].get("output_json") is None
            problem: Problem = "sample_parse_error" if unread else "invalid_variable_error"
            reason = "the answer is not JSON" if unread else f"there is no '{step}'"
            raise GraderError(problem, f"'{{{{ {path} }}}}': {reason}") from None
    return value


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
