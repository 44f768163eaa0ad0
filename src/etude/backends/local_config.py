"""The config of training in this process: `_type: local`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from etude.backends.capabilities import EVERY_KIND, Capabilities, JobHyperparameters
from etude.config.component import CHANGEABLE
from etude.config.finetuning import TrainerAdapterConfig
from etude.core.sample import Kind

LOCAL_CAPABILITIES = Capabilities(
    token_ids_for=EVERY_KIND, versions=True, from_base=True, records_samples=True
)
"""All algorithms, a user's too, on token ids."""


class LoraConfig(BaseModel, extra="forbid"):
    """Train LoRA weights and leave the model's own as they are (Hu et al., 2021)."""

    r: int = Field(default=16, ge=1)
    """Rank."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: updates are multiplied by alpha / r."""
    target_modules: list[str] | None = None
    """Names of linear layers and embeddings for LoRA weights; left out: all linear layers but the head."""


class LocalAdapterConfig(TrainerAdapterConfig, name="local"):
    """Train the model that the agents sample from, in this process or on a cluster's nodes."""

    learning_rate: float | None = Field(default=None, gt=0)
    """Of AdamW: the highest of the run. Left out: 3e-4 for LoRA weights, 1e-5 for all weights."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from there to 0 at the end of the run, or of the job where every job starts
    from the base model."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which it rises from 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    batch_size: int | None = Field(default=None, ge=1)
    """Trajectories (or pairs) per optimiser step; left out: all of an epoch's."""
    passes: int = Field(default=1, ge=1)
    """Times that an epoch's trajectories are gone over."""
    token_budget: Annotated[int | None, CHANGEABLE] = Field(default=None, ge=1)
    """Tokens that go through the model at a time: memory for speed. Left out: 16384; on a CPU as many as keep
    1.2 GB for the gradient if that is less (2083 of a model of 135 million parameters), and 1024 at least."""
    packing: Literal["tree", "padded"] = "tree"
    """Compute tokens that trajectories share once (`tree`), or for each of them (`padded`)."""
    gradient_checkpointing: Annotated[bool | None, CHANGEABLE] = None
    """Compute what happens inside of layers again for the gradient in place of keeping it: less memory, up to
    a third more time. Left out: where memory would not be enough otherwise."""
    lora: LoraConfig | None = None
    """Train LoRA weights; left out: all weights."""
    shard_training: Annotated[bool, CHANGEABLE] = False
    """With `cluster.learners`: each learner holds only a part of the weights and of the optimiser's state."""
    checkpoint_steps: Annotated[int, CHANGEABLE] = Field(default=10, ge=1)
    """With `cluster.learners`: optimiser steps between the checkpoints that a job can go on from."""

    record_ratios: Annotated[bool, CHANGEABLE] = False
    """Keep the learner's own logprob of every token that it trains on, for the view: some 8 bytes a token."""

    @property
    def rate(self) -> float:
        """The learning rate."""
        return self.learning_rate or (1e-5 if self.lora is None else 3e-4)

    def lora_with(self, given: JobHyperparameters) -> LoraConfig | None:
        """The LoRA weights that are trained; None for all weights."""
        rank, alpha = given.lora_rank, given.lora_alpha
        if rank is None:
            return self.lora
        if not rank:
            return None
        changes = {"r": rank} if alpha is None else {"r": rank, "alpha": alpha}
        return (self.lora or LoraConfig()).model_copy(update=changes)

    def for_job(self, kind: Kind, given: JobHyperparameters) -> LocalAdapterConfig:
        """The config for a job that learns from that kind of data, with what its maker gave instead."""
        changes: dict[str, Any] = {"lora": self.lora_with(given)}
        if given.num_epochs is not None:
            changes["passes"] = given.num_epochs
        if given.rl_learning_rate is not None and kind != "imitation":
            changes["learning_rate"] = given.rl_learning_rate
        if given.learning_rate is not None:
            changes |= {"learning_rate": given.learning_rate, "lr_schedule": "constant", "warmup_steps": 0}
        if given.batch_size is not None:
            changes["batch_size"] = given.batch_size
        return self.model_copy(update=changes)
