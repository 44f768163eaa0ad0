"""The config of training in this process: `_type: local`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from etude.backends.capabilities import JobHyperparameters
from etude.config.changeable import CHANGEABLE
from etude.config.finetuning import TrainerAdapterConfig
from etude.core.trajectory import Method
from etude.learner.variants import DEFAULT_VARIANT, Variant, with_variant


class LoraConfig(BaseModel):
    """Train LoRA weights and leave the model's own as they are (Hu et al., 2021)."""

    model_config = ConfigDict(extra="forbid")

    r: int = Field(default=16, ge=1, description="Rank.")
    alpha: float = Field(default=32.0, gt=0, description="Scale: updates are multiplied by alpha / r.")
    target_modules: list[str] | None = Field(
        default=None, description="Names of layers to put LoRA weights on; left out: all linear layers."
    )


class GrpoConfig(BaseModel):
    """Options of GRPO, named after their papers. Those that are left out are as the variant has them."""

    model_config = ConfigDict(extra="forbid")

    variant: Variant = Field(
        default=DEFAULT_VARIANT, description="A name for a choice of the options below; each can be changed."
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="ε_low of the clipped ratio.")
    clip_high: float = Field(default=0.28, gt=0, description="ε_high (clip-higher, DAPO).")
    beta: float = Field(default=0.0, ge=0, description="Weight of the KL to the base model in the loss.")
    reward_kl: float = Field(
        default=0.0,
        ge=0,
        description="Price in the reward of each nat that an episode is from the base model.",
    )
    kl_estimator: Literal["k3", "unbiased"] = Field(
        default="k3", description="How that KL is estimated (Schulman's, or times the ratio: DeepSeek-V3.2)."
    )
    entropy_bonus: float = Field(
        default=0.0, ge=0, description="Weight of the entropy that is rewarded at every sampled token."
    )
    aggregation: Literal["token", "sequence", "constant"] = Field(
        default="token",
        description="Averages over all tokens (DAPO), per sequence (GRPO), or by a constant (Dr. GRPO).",
    )
    constant_length: int = Field(
        default=256, ge=1, description="The constant of `aggregation: constant`, in tokens."
    )
    ratio: Literal["token", "sequence"] = Field(
        default="token", description="Each token's own ratio, or one of the whole sequence (GSPO)."
    )
    surrogate: Literal["clip", "cispo"] = Field(
        default="clip",
        description="Clip the ratio (PPO), or truncate it and keep every token's gradient (CISPO).",
    )
    correction: Literal["none", "truncate", "mask"] = Field(
        default="none",
        description="Importance weights for tokens that other weights, or another engine, sampled: bounded "
        "(truncated importance sampling), or 0 out of bounds.",
    )
    correction_level: Literal["token", "sequence"] = Field(
        default="token", description="Each token's own importance weight, or the product over the sequence."
    )
    correction_floor: float = Field(default=0.0, ge=0, le=1, description="Their lower bound.")
    correction_cap: float = Field(default=2.0, ge=1, description="Their upper bound.")
    off_policy_limit: float | None = Field(
        default=None,
        gt=0,
        description="Leave out bad sequences that the policy has become this much less likely to sample, in "
        "nats per token (DeepSeek-V3.2).",
    )
    advantage_scale: Literal["std", "none"] = Field(
        default="std", description="Divide by the group's deviation (GRPO), or not (Dr. GRPO)."
    )

    @model_validator(mode="before")
    @classmethod
    def _as_the_variant_has_it(cls, given: Any) -> Any:
        return with_variant(given) if isinstance(given, Mapping) else given


class DpoConfig(BaseModel):
    """Options of DPO."""

    model_config = ConfigDict(extra="forbid")

    beta: float = Field(default=0.1, gt=0, description="How hard preferences pull away from the reference.")
    label_smoothing: float = Field(
        default=0.0, ge=0, lt=0.5, description="Share of pairs that may be the wrong way round (cDPO)."
    )
    loss: Literal["sigmoid", "sigmoid_norm", "ipo"] = Field(
        default="sigmoid", description="DPO's, the same on means per token, or IPO's (on means per token)."
    )
    reference: Literal["sampler", "base"] = Field(
        default="sampler", description="The policy that sampled the pairs, or the base model."
    )

    @model_validator(mode="after")
    def _smoothed_where_there_are_labels(self) -> DpoConfig:
        if self.loss == "ipo" and self.label_smoothing:
            raise ValueError("label_smoothing is for the sigmoid losses; leave it out with `loss: ipo`")
        return self


class LocalAdapterConfig(TrainerAdapterConfig, name="local"):
    """Train in this process, on the model that the agents sample from."""

    learning_rate: float = Field(default=1e-5, gt=0, description="Of AdamW: the highest of the run.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="How the learning rate falls from there to the end of the run.",
    )
    lr_schedule_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Epochs of training over which it falls; left out: `finetuning.num_epochs`, or a job's "
        "own steps where every job starts from the base model.",
    )
    lr_floor: float = Field(
        default=0.0, ge=0, le=1, description="Share of the learning rate that is left at the end."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Of AdamW.")
    warmup_steps: int = Field(default=0, ge=0, description="Optimiser steps over which it rises from 0.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Trajectories (or pairs) per optimiser step; left out: all of an epoch's.",
    )
    passes: int = Field(default=1, ge=1, description="Times that an epoch's trajectories are gone over.")
    token_budget: Annotated[int, CHANGEABLE] = Field(
        default=16384,
        ge=1,
        description="Tokens that go through the model at a time: memory for speed.",
    )
    packing: Literal["tree", "padded"] = Field(
        default="tree",
        description="Compute tokens that trajectories share once (`tree`), or for each of them (`padded`).",
    )
    gradient_checkpointing: Annotated[bool, CHANGEABLE] = Field(
        default=False,
        description="Compute what happens inside of layers again for the gradient in place of keeping it: "
        "less memory, about a third more time.",
    )
    lora: LoraConfig | None = Field(default=None, description="Train LoRA weights; left out: all weights.")
    grpo: GrpoConfig = Field(default_factory=GrpoConfig, description="Options of the method `grpo`.")
    dpo: DpoConfig = Field(default_factory=DpoConfig, description="Options of the method `dpo`.")

    def lora_with(self, given: JobHyperparameters) -> LoraConfig | None:
        """The LoRA weights that are trained; None for all weights."""
        rank, alpha = given.lora_rank, given.lora_alpha
        if rank is None:
            return self.lora
        if not rank:
            return None
        changes = {"r": rank} if alpha is None else {"r": rank, "alpha": alpha}
        return (self.lora or LoraConfig()).model_copy(update=changes)

    def for_job(self, method: Method, given: JobHyperparameters) -> LocalAdapterConfig:
        """The config for a job of the method, with what its maker gave in place of its own."""
        changes: dict[str, Any] = {"lora": self.lora_with(given)}
        if given.num_epochs is not None:
            changes["passes"] = given.num_epochs
        if given.rl_learning_rate is not None and method != "supervised":
            changes["learning_rate"] = given.rl_learning_rate
        if given.dpo_beta is not None:
            changes["dpo"] = self.dpo.model_copy(update={"beta": given.dpo_beta})
        return self.model_copy(update=changes)

    def options_of(self, method: Method) -> dict[str, Any]:
        """The options of a method."""
        return {"grpo": self.grpo.model_dump(), "dpo": self.dpo.model_dump(), "supervised": {}}[method]
