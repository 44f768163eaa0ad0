"""The hyperparameters of jobs: common ones, algorithms' own ones, and the meaning of `"auto"`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from etude.algorithms.algorithm import Algorithm, algorithm_type, gradient_fields, make_algorithm
from etude.config import registry
from etude.config.key_types import descriptions
from etude.core.sample import Kind
from etude.core.trajectory import Method
from etude.wire.sampling import Flag

Auto: TypeAlias = Literal["auto"]
Positive: TypeAlias = Annotated[float, Field(gt=0, le=1e6, strict=True)]
Rate: TypeAlias = Annotated[float, Field(ge=1e-12, le=10, strict=True)]
Epochs: TypeAlias = Annotated[int, Field(ge=1, le=10_000, strict=True)]
Count: TypeAlias = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
CountOrNone: TypeAlias = Annotated[int, Field(ge=0, le=10_000_000, strict=True)]
"""A count that may be 0."""

_LEARNING_RATES: dict[Kind, tuple[float, float]] = {
    "imitation": (2e-4, 1e-5),
    "pairs": (5e-5, 1e-6),
    "samples": (2e-5, 1e-6),
}
"""Learning rates at a multiplier of 1: for LoRA weights, and for all weights."""

_EPOCHS: dict[Kind, int] = {"imitation": 3, "pairs": 2, "samples": 1}
"""Samples are off-policy after the first pass, so one pass is the default."""

_LARGEST_BATCH = 32
_STEPS_OF_AN_EPOCH = 8
_RANK = 16


class Hyperparameters(BaseModel, extra="forbid"):
    """OpenAI's hyperparameters, followed by Etude's."""

    n_epochs: Auto | Epochs | None = Field(default=None, description="Number of passes over the job's data.")
    batch_size: Auto | Count | None = Field(default=None, description="Rows per optimiser step.")
    learning_rate_multiplier: Auto | Positive | None = Field(
        default=None, description="Multiplies the method's learning rate."
    )
    learning_rate: Auto | Rate | None = Field(
        default=None, description="AdamW's learning rate before the multiplier, instead of the method's."
    )
    lr_schedule: Literal["auto", "constant", "linear", "cosine"] | None = Field(
        default=None, description="How the learning rate falls over the job's steps; `auto` is `constant`."
    )
    warmup_steps: Auto | CountOrNone | None = Field(
        default=None, description="Steps over which the learning rate rises from 0; `auto` is 0."
    )
    gradient_checkpointing: Auto | Flag | None = Field(
        default=None, description="Saves memory and takes about a third more time; `auto` is false."
    )
    lora_rank: Auto | CountOrNone | None = Field(
        default=None, description="Rank of the LoRA weights; 0 trains all weights."
    )
    lora_alpha: Auto | Positive | None = Field(
        default=None, description="Scale of the LoRA weights; `auto` is twice the rank."
    )

    def given_values(self) -> dict[str, Any]:
        """Return the hyperparameters with a value other than `auto`."""
        return {key: value for key, value in self.model_dump().items() if value not in (None, "auto")}


def server_algorithms() -> dict[Method, type[Algorithm]]:
    """Return the algorithms that a job can name: shipped ones and those from `--algorithms`."""
    names = registry.names("trajectory_builders")
    types = (registry.lookup("trajectory_builders", name).config_type for name in names)
    known = (kind for kind in types if issubclass(kind, Algorithm))
    return {kind.type_name: kind for kind in known if kind().job_method()[0] == kind.type_name}


@lru_cache(maxsize=64)
def hyperparameters_model(algorithm: type[Algorithm]) -> type[Hyperparameters]:
    """Return the hyperparameters model of an algorithm: the common ones and its gradient options.

    Each may be `"auto"`, which keeps the algorithm's own value.
    """
    fields: dict[str, Any] = {}
    if algorithm.kind == "samples":
        meaning = "The reference model: the one that the job starts from, or the server's base."
        reference = Literal["auto", "start", "base"] | None
        fields["reference"] = (reference, Field(default=None, description=meaning))
    meanings, options = descriptions(algorithm), gradient_fields(algorithm)
    for name in options:
        option = algorithm.model_fields[name]
        kind: Any = Annotated[option.annotation, *option.metadata]
        fields[name] = (Auto | kind | None, Field(default=None, description=meanings.get(name)))

    def fits(asked: Hyperparameters) -> Hyperparameters:
        given = asked.given_values()
        algorithm.model_validate({name: given[name] for name in given.keys() & {*options}})
        return asked

    checks: dict[str, Any] = {"_fits": model_validator(mode="after")(fits)}
    return create_model(
        f"{algorithm.__name__}Hyperparameters",
        __base__=Hyperparameters,
        __doc__=f"Hyperparameters of `{algorithm.type_name}`; `auto` is the algorithm's default.",
        __validators__=checks,
        **fields,
    )


@lru_cache(maxsize=64)
def method_model(algorithm: type[Algorithm]) -> type[BaseModel]:
    """Return the model of `{"grpo": {"hyperparameters": {…}}}` for an algorithm."""
    model, closed = hyperparameters_model(algorithm), ConfigDict(extra="forbid")
    part: Any = create_model(
        f"{algorithm.__name__}Options",
        __config__=closed,
        hyperparameters=(model, Field(default_factory=model)),
    )
    fields: dict[str, Any] = {algorithm.type_name: (part, ...)}
    return create_model("Method", __config__=closed, **fields)


def job_algorithm(method: Method, values: Mapping[str, Any]) -> Algorithm:
    """Return a job's algorithm with resolved hyperparameters. DPO's reference is the model it starts from."""
    kind = algorithm_type(method)
    options = {name: values[name] for name in gradient_fields(kind)}
    return make_algorithm(method, options | ({"reference": "base"} if kind.kind == "pairs" else {}))


def resolve_hyperparameters(
    method: Method, asked: Hyperparameters, rows: int, lora: dict[str, Any] | None, *, fine_tuned: bool
) -> dict[str, Any]:
    """Return a value for every hyperparameter, for a file of `rows` rows.

    `lora` is the start model's LoRA config. A fine-tuned model keeps its LoRA shape. Raises ValueError if the
    job asks for LoRA weights of another shape.
    """
    given, algorithm = asked.given_values(), algorithm_type(method)
    kind, options = algorithm.kind, {*gradient_fields(algorithm)}
    chosen = make_algorithm(method, {name: given[name] for name in options & given.keys()})
    rank, alpha = _lora_size(given, lora, fine_tuned=fine_tuned)
    for_lora, for_all = _LEARNING_RATES[kind]
    batch = rows if kind == "samples" else max(1, min(_LARGEST_BATCH, rows // _STEPS_OF_AN_EPOCH))
    defaults: dict[str, Any] = {
        "n_epochs": _EPOCHS[kind],
        "batch_size": batch,
        "learning_rate_multiplier": 1.0,
        "learning_rate": for_lora if rank else for_all,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "gradient_checkpointing": False,
        **({"reference": "start"} if kind == "samples" else {}),
        **chosen.model_dump(mode="json", include=options),
    }
    return defaults | given | {"lora_rank": rank, "lora_alpha": alpha}


def _lora_size(given: dict[str, Any], lora: dict[str, Any] | None, *, fine_tuned: bool) -> tuple[int, float]:
    rank, alpha = given.get("lora_rank"), given.get("lora_alpha")
    if not fine_tuned:
        rank = _RANK if rank is None else int(rank)
        return rank, float(alpha or 2 * rank)
    own_rank, own_alpha = (0, 0.0) if lora is None else (int(lora["r"]), float(lora["alpha"]))
    if rank not in (None, own_rank) or (own_rank and alpha not in (None, own_alpha)):
        raise ValueError(
            f"the model was trained with lora_rank {own_rank} and lora_alpha {own_alpha:g}, and keeps "
            "both; leave them out, or start from the base model"
        )
    return own_rank, own_alpha
