"""The request for a training job: its body, its hyperparameters, and the meaning of `"auto"`."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, Field, PrivateAttr, TypeAdapter, field_validator, model_validator

from etude.algorithms.algorithm import Algorithm, algorithm_type, gradient_fields, make_algorithm
from etude.config import registry
from etude.core.errors import alternatives
from etude.core.keys import content_hash
from etude.core.sample import Kind
from etude.core.trajectory import Method
from etude.server.models import ServedModel
from etude.wire.request_body import Flag

_Key = Annotated[str, Field(min_length=1, max_length=64)]
_Value = Annotated[str, Field(max_length=512)]
_SUFFIX = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

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


class Hyperparameters(BaseModel, extra="allow"):
    """OpenAI's hyperparameters, Etude's, and as extra values the options of an algorithm."""

    n_epochs: Auto | Epochs | None = None
    batch_size: Auto | Count | None = None
    learning_rate_multiplier: Auto | Positive | None = None
    learning_rate: Auto | Rate | None = None
    """AdamW's, before the multiplier."""
    lr_schedule: Literal["auto", "constant", "linear", "cosine"] | None = None
    warmup_steps: Auto | CountOrNone | None = None
    gradient_checkpointing: Auto | Flag | None = None
    lora_rank: Auto | CountOrNone | None = None
    lora_alpha: Auto | Positive | None = None

    def given_values(self) -> dict[str, Any]:
        """Return the hyperparameters with a value other than `auto`. An algorithm's option may be null."""
        extra = self.model_extra or {}
        dump = self.model_dump().items()
        return {key: value for key, value in dump if value != "auto" and (value is not None or key in extra)}

    def require_options(self, algorithm: type[Algorithm]) -> None:
        """Raise ValueError unless the extra values are gradient options of the algorithm.

        If it learns from samples, `reference` is one more: the model that the job starts from, or the base.
        """
        given, extra = self.given_values(), self.model_extra or {}
        options = {name: given[name] for name in extra if name in given}
        known = gradient_fields(algorithm)
        if algorithm.kind == "samples":
            known.append("reference")
            if options.pop("reference", "start") not in ("start", "base"):
                raise ValueError("the reference model is 'start' or 'base'")
        if wrong := next((name for name in options if name not in known), None):
            raise ValueError(
                f"{algorithm.type_name} has no hyperparameter '{wrong}'"
                + alternatives(wrong, [*Hyperparameters.model_fields, *known])
            )
        algorithm.model_validate(options)


def server_algorithms() -> dict[Method, type[Algorithm]]:
    """Return the algorithms that a job can name: shipped ones and those from `--algorithms`."""
    names = registry.names("trajectory_builders")
    types = (registry.lookup("trajectory_builders", name).config_type for name in names)
    known = (kind for kind in types if issubclass(kind, Algorithm))
    return {kind.type_name: kind for kind in known if type(kind().objective()) is kind}


class _MethodOptions(BaseModel, extra="forbid"):
    hyperparameters: Hyperparameters = Field(default_factory=Hyperparameters)


class MethodBody(BaseModel, extra="allow"):
    """`method`: its type, which is an algorithm, and the hyperparameters under the type's name."""

    type: Method

    @field_validator("type")
    @classmethod
    def _is_known(cls, name: Method) -> Method:
        known = server_algorithms()
        if name not in known:
            raise ValueError(
                f"there is no algorithm '{name}' here. Allowed: {', '.join(known)}; to add your own, "
                "start the server with --algorithms module:Name"
            )
        return name

    @model_validator(mode="after")
    def _fits_its_algorithm(self) -> Self:
        given = self.model_extra or {}
        if wrong := sorted(given.keys() - {self.type}):
            raise ValueError(f"the method is {self.type}, but there are options for {', '.join(wrong)}")
        parts = {name: part or {} for name, part in given.items()}
        for options in TypeAdapter(dict[str, _MethodOptions]).validate_python(parts).values():
            options.hyperparameters.require_options(algorithm_type(self.type))
            self._asked = options.hyperparameters
        return self

    _asked: Hyperparameters = PrivateAttr(default_factory=Hyperparameters)

    @property
    def hyperparameters(self) -> Hyperparameters:
        """The hyperparameters that the request gives."""
        return self._asked


class JobBody(BaseModel, extra="forbid"):
    """The body of a job request: model, data and method."""

    model: str = Field(min_length=1)
    training_file: str = Field(min_length=1)
    validation_file: str | None = None
    method: MethodBody = Field(default_factory=lambda: MethodBody(type="supervised"))
    suffix: str | None = Field(default=None, description="Part of the new model's name.")
    seed: int | None = Field(default=None, ge=0, lt=2**53)
    metadata: dict[_Key, _Value] | None = Field(default=None, max_length=16)
    integrations: list[Literal["none"]] | None = Field(default=None, max_length=0)
    hyperparameters: None = Field(default=None, exclude=True)

    @field_validator("hyperparameters", mode="before")
    @classmethod
    def _is_in_the_method(cls, given: Any) -> None:
        if given is not None:
            raise ValueError(
                'give them as method={"type": "supervised", "supervised": {"hyperparameters": …}}'
            )

    @field_validator("suffix")
    @classmethod
    def _names_a_model(cls, suffix: str | None) -> str | None:
        if suffix and not _SUFFIX.fullmatch(suffix):
            raise ValueError("give 1 to 64 letters, digits, '-' and '_', and begin with a letter or a digit")
        return suffix or None

    def hash(self) -> str:
        """Hash everything that defines the job."""
        return content_hash(self.model_dump(mode="json", exclude_none=True))


def job_algorithm(method: Method, values: Mapping[str, Any]) -> Algorithm:
    """Return a job's algorithm with resolved hyperparameters. DPO's reference is the model it starts from."""
    kind = algorithm_type(method)
    options = {name: values[name] for name in gradient_fields(kind)}
    return make_algorithm(method, options | ({"reference": "base"} if kind.kind == "pairs" else {}))


def resolve_hyperparameters(
    method: Method, asked: Hyperparameters, rows: int, start: ServedModel | None = None
) -> dict[str, Any]:
    """Return a value for every hyperparameter, for a file of `rows` rows.

    `start` is the fine-tuned model that the job starts from, if any, which keeps the shape of its LoRA
    weights. Raises ValueError if the job asks for another shape.
    """
    given, algorithm = asked.given_values(), algorithm_type(method)
    kind, options = algorithm.kind, {*gradient_fields(algorithm)}
    chosen = make_algorithm(method, {name: given[name] for name in options & given.keys()})
    rank, alpha = given.get("lora_rank"), given.get("lora_alpha")
    if start is not None:
        own_rank, own_alpha = (0, 0.0) if start.lora is None else (start.lora.r, start.lora.alpha)
        if rank not in (None, own_rank) or (own_rank and alpha not in (None, own_alpha)):
            raise ValueError(
                f"the model was trained with lora_rank {own_rank} and lora_alpha {own_alpha:g}, and keeps "
                "both; leave them out, or start from the base model"
            )
        rank, alpha = own_rank, own_alpha
    else:
        rank = _RANK if rank is None else int(rank)
        if alpha is not None and not rank:
            raise ValueError("lora_alpha is for LoRA weights, of which lora_rank 0 makes none; leave one out")
        alpha = float(alpha or 2 * rank)
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
