"""What a job is told about training, and what `"auto"` means."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.core.trajectory import Method
from etude.learner.variants import DEFAULT_VARIANT, Variant, with_variant

Auto: TypeAlias = Literal["auto"]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=1)]

_LEARNING_RATES: dict[Method, tuple[float, float]] = {
    "supervised": (2e-4, 1e-5),
    "dpo": (5e-5, 1e-6),
    "grpo": (2e-5, 1e-6),
}
"""Learning rate at a multiplier of 1: of LoRA weights, and of all weights."""

_EPOCHS: dict[Method, int] = {"supervised": 3, "dpo": 2, "grpo": 1}
"""Sampled data is off-policy after its first pass, so grpo goes over it once."""

_LARGEST_BATCH = 32
_STEPS_OF_AN_EPOCH = 8
_RANK = 16


class _Fields(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Hyperparameters(_Fields):
    """OpenAI's, and below them ours."""

    n_epochs: Auto | Count | None = Field(default=None, description="Times that a job goes over its data.")
    batch_size: Auto | Count | None = Field(default=None, description="Rows of an optimiser step.")
    learning_rate_multiplier: Auto | Positive | None = Field(
        default=None, description="Factor of the method's learning rate."
    )
    learning_rate: Auto | Positive | None = Field(
        default=None, description="Of AdamW; takes the place of the method's, before the multiplier."
    )
    lr_schedule: Literal["auto", "constant", "linear", "cosine"] | None = Field(
        default=None, description="How the learning rate falls over the job's steps; `auto` is `constant`."
    )
    warmup_steps: Auto | Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Steps over which the learning rate rises from 0; `auto` is 0."
    )
    lora_rank: Auto | Annotated[int, Field(ge=0)] | None = Field(
        default=None, description="Rank of the LoRA weights; 0 trains all weights."
    )
    lora_alpha: Auto | Positive | None = Field(
        default=None, description="Scale of the LoRA weights; `auto` is twice the rank."
    )


class DpoHyperparameters(Hyperparameters):
    """Those of `dpo`."""

    beta: Auto | Positive | None = Field(default=None, description="Pull to the reference.")
    label_smoothing: Auto | Annotated[float, Field(ge=0, lt=0.5)] | None = None
    loss: Literal["auto", "sigmoid", "sigmoid_norm", "ipo"] | None = None

    @model_validator(mode="after")
    def _smoothed_where_there_are_labels(self) -> DpoHyperparameters:
        if self.loss == "ipo" and self.label_smoothing not in (None, "auto", 0):
            raise ValueError("label_smoothing is for the sigmoid losses; leave it out with the loss ipo")
        return self


class GrpoHyperparameters(Hyperparameters):
    """Those of `grpo`, named after the papers; `auto` is as the variant has it."""

    variant: Literal["auto"] | Variant | None = None
    beta: Auto | Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = Field(
        default=None, description="Weight of the KL to the reference."
    )
    reference: Literal["auto", "start", "base"] | None = Field(
        default=None, description="The model that the job starts from, or the one that the server does."
    )
    clip_low: Auto | Annotated[float, Field(gt=0, lt=1)] | None = None
    clip_high: Auto | Positive | None = None
    aggregation: Literal["auto", "token", "sequence", "constant"] | None = None
    constant_length: Auto | Count | None = None
    ratio: Literal["auto", "token", "sequence"] | None = None
    surrogate: Literal["auto", "clip", "cispo"] | None = None
    kl_estimator: Literal["auto", "k3", "unbiased"] | None = None
    entropy_bonus: Auto | Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    correction: Literal["auto", "none", "truncate", "mask"] | None = None
    correction_level: Literal["auto", "token", "sequence"] | None = None
    correction_floor: Auto | Annotated[float, Field(ge=0, le=1)] | None = None
    correction_cap: Auto | Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = None
    off_policy_limit: Auto | Positive | None = None
    advantage_scale: Literal["auto", "std", "none"] | None = None


class SupervisedMethod(_Fields):
    """`method.supervised`."""

    hyperparameters: Hyperparameters = Field(default_factory=Hyperparameters)


class DpoMethod(_Fields):
    """`method.dpo`."""

    hyperparameters: DpoHyperparameters = Field(default_factory=DpoHyperparameters)


class GrpoMethod(_Fields):
    """`method.grpo`."""

    hyperparameters: GrpoHyperparameters = Field(default_factory=GrpoHyperparameters)


def _method_defaults(method: Method, given: dict[str, Any]) -> dict[str, Any]:
    if method == "grpo":
        return {"reference": "start", **with_variant({"variant": given.get("variant", DEFAULT_VARIANT)})}
    return {"beta": 0.1, "label_smoothing": 0.0, "loss": "sigmoid"} if method == "dpo" else {}


def resolved(
    method: Method, asked: Hyperparameters, rows: int, lora: dict[str, Any] | None, *, fine_tuned: bool
) -> dict[str, Any]:
    """Every hyperparameter with a value, for a file of `rows` rows.

    `lora` is that of the model to start from. A fine-tuned model goes on as it was made. Raises
    ValueError when LoRA weights of another shape are asked for.
    """
    given = {key: value for key, value in asked.model_dump().items() if value not in (None, "auto")}
    rank, alpha = _lora_of(given, lora, fine_tuned=fine_tuned)
    for_lora, for_all = _LEARNING_RATES[method]
    batch = rows if method == "grpo" else max(1, min(_LARGEST_BATCH, rows // _STEPS_OF_AN_EPOCH))
    defaults: dict[str, Any] = {
        "n_epochs": _EPOCHS[method],
        "batch_size": batch,
        "learning_rate_multiplier": 1.0,
        "learning_rate": for_lora if rank else for_all,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        **_method_defaults(method, given),
    }
    return defaults | given | {"lora_rank": rank, "lora_alpha": alpha}


def _lora_of(given: dict[str, Any], lora: dict[str, Any] | None, *, fine_tuned: bool) -> tuple[int, float]:
    rank, alpha = given.get("lora_rank"), given.get("lora_alpha")
    if not fine_tuned:
        rank = _RANK if rank is None else int(rank)
        return rank, float(alpha or 2 * rank)
    there = (0, 0.0) if lora is None else (int(lora["r"]), float(lora["alpha"]))
    if rank not in (None, there[0]) or (rank and alpha not in (None, there[1])):
        raise ValueError(
            f"the model was trained with lora_rank {there[0]} and lora_alpha {there[1]:g}, and goes on with "
            "these; leave both out, or start from the base model"
        )
    return there
