"""Graders as JSON, in OpenAI's words: string checks, similarity, Python, a judge, and several as one."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, field_validator, model_validator

from etude.config.references import LlmRef
from etude.core.call import Temperature, TopP
from etude.core.errors import RequestError
from etude.graders.formula import Formula
from etude.graders.similarity import METRICS, MISSING
from etude.graders.template import Template

_LONGEST_SOURCE = 256 * 1024


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    name: str = "grader"
    """Shown beside its score."""


class StringCheckGrader(_Spec):
    """1 where two texts compare as wanted, and 0 elsewhere."""

    type: Literal["string_check"]
    input: Template
    """Usually `{{ sample.output_text }}`."""
    reference: Template
    operation: Literal["eq", "ne", "like", "ilike"]
    """Equal, not equal, or the input contains the reference: exactly, or in capital or small letters."""


class TextSimilarityGrader(_Spec):
    """How alike two texts are, from 0 to 1."""

    type: Literal["text_similarity"]
    input: Template
    reference: Template
    evaluation_metric: str
    """`fuzzy_match`, `bleu`, `gleu`, `rouge_1` to `rouge_5`, or `rouge_l`."""

    @field_validator("evaluation_metric")
    @classmethod
    def _is_here(cls, name: str) -> str:
        if name not in METRICS:
            reason = f", since {MISSING[name]}" if name in MISSING else ""
            raise ValueError(f"there is no '{name}' here{reason}; allowed: {', '.join(METRICS)}")
        return name


class PythonGrader(_Spec):
    """The number that `grade(sample, item)` of a Python program returns. It runs in the sandbox."""

    type: Literal["python"]
    source: str = Field(min_length=1, max_length=_LONGEST_SOURCE)
    """It defines `grade(sample: dict, item: dict) -> float`, with the standard library at hand."""
    image_tag: None = None
    """Not taken: the sandbox has no images."""

    @field_validator("source")
    @classmethod
    def _defines_grade(cls, source: str) -> str:
        try:
            ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"no Python program: {error}") from None
        if "grade" not in source:
            raise ValueError("the program defines no function grade(sample, item)")
        return source


class TextPart(BaseModel):
    """A part of a message to a judge. Models here take text only."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    type: Literal["input_text", "output_text"]
    text: Template


class JudgeMessage(BaseModel):
    """A message to a judge."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    role: Literal["user", "assistant", "system", "developer"]
    content: Template | TextPart | tuple[TextPart, ...]
    type: Literal["message"] | None = None

    @property
    def text(self) -> str:
        """Its template."""
        if isinstance(self.content, str):
            return self.content
        parts = (self.content,) if isinstance(self.content, TextPart) else self.content
        return "\n".join(part.text for part in parts)


class JudgeSampling(BaseModel):
    """How a judge samples."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    max_completions_tokens: int = Field(default=4096, ge=1)
    """Most tokens of an answer of the judge."""
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    reasoning_effort: str | None = None
    """Handed to the chat template of the judge."""


class JudgeGrader(_Spec):
    """Keys of the graders that ask a model."""

    model: LlmRef
    """The judge: in a config an entry of `llms`, at the server one of its models. Its answer is held to a
    JSON schema."""
    input: tuple[JudgeMessage, ...] = Field(min_length=1)
    """The messages that it is asked with."""
    sampling_params: JudgeSampling = JudgeSampling()


class ScoreModelGrader(JudgeGrader):
    """The score that a model gives."""

    type: Literal["score_model"]
    range: tuple[FiniteFloat, FiniteFloat] = (0.0, 1.0)
    """The lowest and the highest score."""

    @field_validator("range")
    @classmethod
    def _rises(cls, limits: tuple[float, float]) -> tuple[float, float]:
        if not limits[0] < limits[1]:
            raise ValueError(f"the first number is the lower one, found {limits[0]:g} and {limits[1]:g}")
        return limits


class LabelModelGrader(JudgeGrader):
    """1 where a model gives the answer one of the passing labels, and 0 elsewhere."""

    type: Literal["label_model"]
    labels: tuple[str, ...] = Field(min_length=1)
    """Those that it may give."""
    passing_labels: tuple[str, ...] = Field(min_length=1)
    """Those of a good answer."""

    @model_validator(mode="after")
    def _can_be_given(self) -> LabelModelGrader:
        if unknown := [label for label in self.passing_labels if label not in self.labels]:
            raise ValueError(
                f"the passing label {unknown[0]!r} is not among labels: {', '.join(self.labels)}"
            )
        return self


SingleGrader: TypeAlias = Annotated[
    StringCheckGrader | TextSimilarityGrader | PythonGrader | ScoreModelGrader | LabelModelGrader,
    Field(discriminator="type"),
]


class MultiGrader(_Spec):
    """A formula over the scores of other graders."""

    type: Literal["multi"]
    graders: dict[str, SingleGrader] = Field(min_length=1)
    """By the names that the formula knows them by."""
    calculate_output: str = Field(min_length=1)
    """`0.8 * correct + 0.2 * min(style, 0.5)`: + - * / ^, min, max, abs, floor, ceil, exp, sqrt, log."""

    @field_validator("graders", mode="before")
    @classmethod
    def _by_name(cls, graders: Any) -> Any:
        """The official client's types have a single grader here."""
        single = isinstance(graders, Mapping) and isinstance(graders.get("type"), str)
        return {str(graders.get("name", "grader")): graders} if single else graders

    @model_validator(mode="after")
    def _can_be_calculated(self) -> MultiGrader:
        if wrong := [name for name in self.graders if not name.isidentifier()]:
            raise ValueError(f"'{wrong[0]}' cannot stand in a formula; take letters, digits and '_'")
        try:
            Formula(self.calculate_output, self.graders)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return self


GraderSpec: TypeAlias = Annotated[
    StringCheckGrader
    | TextSimilarityGrader
    | PythonGrader
    | ScoreModelGrader
    | LabelModelGrader
    | MultiGrader,
    Field(discriminator="type"),
]
"""Any grader."""


def parts_of(spec: Any) -> dict[str, Any]:
    """The single graders of any grader, by name: those of a `multi`, or itself."""
    return dict(spec.graders) if isinstance(spec, MultiGrader) else {spec.name: spec}


def judges_of(spec: Any) -> set[str]:
    """The models that a grader asks."""
    return {part.model for part in parts_of(spec).values() if isinstance(part, JudgeGrader)}
