"""`method: {"type": "reinforcement"}`: a job that samples answers to its file's prompts, grades them, and
learns from that by GRPO."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model, model_validator

from etude.algorithms.algorithm import algorithm_type, kind_of
from etude.core.call import Constraint
from etude.core.training_rows import PROMPTS, ROW_OF
from etude.core.trajectory import Method
from etude.graders.spec import GraderSpec, judges_of
from etude.server.hyperparameters import Auto, Count, Hyperparameters, Positive, method_model, resolved

REINFORCEMENT = "reinforcement"
_LOSS = "grpo"
_ANSWERS = 8
"""To each prompt, at a `compute_multiplier` of 1."""
_MOST_ANSWERS = 256
_LARGEST_BATCH = 32
_STEPS_OF_AN_EPOCH = 8

_Multiplier = Literal["auto"] | Positive
_OWN: dict[str, Any] = {
    "compute_multiplier": (
        _Multiplier | None,
        Field(default=None, description=f"Times {_ANSWERS} answers to each prompt; `auto` is 1."),
    ),
    "eval_interval": (
        Auto | Count | None,
        Field(default=None, description="Steps between evaluations; `auto` is at the end of each epoch."),
    ),
    "eval_samples": (
        Auto | Count | None,
        Field(default=None, description="Answers to each prompt of the validation file; `auto` is 1."),
    ),
    "reasoning_effort": (
        Literal["default", "low", "medium", "high"] | None,
        Field(default=None, description="Handed to the chat template, where it knows the word."),
    ),
    "temperature": (
        Auto | Annotated[float, Field(ge=1e-6, le=100)] | None,
        Field(default=None, description="Of the sampled answers; `auto` is 1."),
    ),
    "max_tokens": (
        Auto | Count | None,
        Field(default=None, description="Most tokens of an answer; `auto` is the server's `--max-tokens`."),
    ),
}
_DEFAULTS: Mapping[str, Any] = {
    "n_epochs": 3,
    "compute_multiplier": 1.0,
    "eval_interval": None,
    "eval_samples": 1,
    "reasoning_effort": "default",
    "temperature": 1.0,
    "max_tokens": None,
}


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _JsonSchema(_Closed):
    name: str = Field(min_length=1)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Closed):
    """The form that the answers must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema belongs to the type json_schema, and that needs it")
        return self


def constraint_of(response_format: Mapping[str, Any] | None) -> Constraint | None:
    """The constraint that a checked response format is for sampling."""
    match response_format:
        case {"type": "json_object"}:
            return Constraint("json_object")
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            return Constraint("json_schema", json.dumps(schema))
    return None


@cache
def reinforcement_model() -> type[BaseModel]:
    """The model of `{"reinforcement": {"grader": {…}, "hyperparameters": {…}, "response_format": {…}}}`.

    The hyperparameters are OpenAI's for it, and those of GRPO.
    """
    grpo = method_model(algorithm_type(_LOSS)).model_fields[_LOSS].annotation
    base = grpo.model_fields["hyperparameters"].annotation  # type: ignore[union-attr]
    hyperparameters: Any = create_model("ReinforcementHyperparameters", __base__=base, **_OWN)
    part: Any = create_model(
        "ReinforcementOptions",
        __base__=_Closed,
        grader=(GraderSpec, ...),
        hyperparameters=(hyperparameters, Field(default_factory=hyperparameters)),
        response_format=(ResponseFormat | None, None),
    )
    fields: dict[str, Any] = {REINFORCEMENT: (part, ...)}
    return create_model("ReinforcementMethod", __base__=_Closed, **fields)


def loss_of_method(method: Method) -> Method:
    """The algorithm that learns in jobs of a method."""
    return _LOSS if method == REINFORCEMENT else method


def lines_of(method: Method) -> Method:
    """The method by whose name lines of a job's files are known."""
    return PROMPTS if method == REINFORCEMENT else ROW_OF[kind_of(method)]


def resolved_for(method: Method, asked: Hyperparameters, rows: int, lora: Any, **more: Any) -> dict[str, Any]:
    """`resolved` for any method of a job."""
    values = resolved(loss_of_method(method), asked, rows, lora, **more)
    if method != REINFORCEMENT:
        return values
    batch = max(1, min(_LARGEST_BATCH, rows // _STEPS_OF_AN_EPOCH))
    return values | {"batch_size": batch, **_DEFAULTS} | asked.given()


def answers_of(values: Mapping[str, Any]) -> int:
    """Answers to each prompt of a step. Raises ValueError for more than can be meant."""
    answers: int = max(2, round(_ANSWERS * values["compute_multiplier"]))
    if answers > _MOST_ANSWERS:
        raise ValueError(f"that is {answers} answers to each prompt; at most {_MOST_ANSWERS} are made")
    return answers


def grader_of(options: Mapping[str, Any]) -> Any:
    """The grader in the options of a job."""
    return TypeAdapter(GraderSpec).validate_python(options["grader"])


def models_of(job: Mapping[str, Any]) -> set[str]:
    """The models that a job, a row of the database, needs: the one it starts from, and its judges."""
    judges = judges_of(grader_of(job["options"])) if job["options"] else set()
    return {job["model"], *judges}
