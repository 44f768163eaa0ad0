"""The adapter `local`: the model that the agents sample from is the one that is trained."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, Field

from etude.backends.capabilities import EVERY_KIND, Capabilities, JobHyperparameters
from etude.config.component import CHANGEABLE
from etude.config.finetuning import TrainerAdapterConfig
from etude.config.registry import register_trainer_adapter
from etude.core.errors import CapabilityError, RequestError
from etude.core.interfaces import bare
from etude.core.sample import Kind
from etude.inference.local import LocalLlmConfig, require_local_extra
from etude.store.files import private_folder
from etude.store.status import LEARNERS

if TYPE_CHECKING:
    from etude.backends.learning import Learners
    from etude.backends.local_adapter import LocalAdapter
    from etude.config.builder import Builder
    from etude.config.component import ClusterConfig
    from etude.runners.process import Cluster

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


_DESK = "etude.backends.local_job:JobDesk"


def check_learners(config: LocalAdapterConfig, llm: LocalLlmConfig, cluster: ClusterConfig | None) -> None:
    """Raise CapabilityError for what does not go together where a cluster's nodes train, or do not."""
    if cluster is None or cluster.learners is None:
        if config.shard_training:
            raise CapabilityError(
                "`shard_training` shares the weights out among processes, and the run's own process trains: "
                "set cluster.learners, or leave it out"
            )
    elif llm.quantization is not None:
        raise CapabilityError(
            f"a model with `quantization: {llm.quantization}` is trained in the run's own process: leave out "
            "cluster.learners, or 'quantization'"
        )


@register_trainer_adapter(config_type=LocalAdapterConfig)
async def local(config: LocalAdapterConfig, builder: Builder) -> AsyncIterator[LocalAdapter]:
    """The adapter of the run's target model. Raises CapabilityError when that is not a local model."""
    require_local_extra()
    from etude.backends.local_adapter import LocalAdapter
    from etude.inference.embedded import EmbeddedEngine

    target = builder.config.finetuning.target_model
    if target is None:
        raise RequestError("'finetuning.target_model' is missing: name the entry of `llms` to train")
    engine = bare(await builder.get_llm(target))
    if not isinstance(engine, EmbeddedEngine):
        kind = builder.config.llms[target].type_name
        raise CapabilityError(
            f"the trainer adapter 'local' trains models of `_type: local`, and llms.{target} is "
            f"`_type: {kind}`; make it local, or choose an adapter for its backend"
        )
    llm = builder.config.llms[target]
    assert isinstance(llm, LocalLlmConfig)
    check_learners(config, llm, builder.config.cluster)
    seed = builder.config.finetuning.seed
    yield LocalAdapter(config, engine.policy, builder.checkpoints, seed, await _learners(builder, llm))


async def _learners(builder: Builder, llm: LocalLlmConfig) -> Learners | None:
    """The learners on the cluster of the config; None where this process trains."""
    from etude.backends.learning import Learners

    settings = builder.config.cluster
    if settings is None or settings.learners is None or builder.run is None:
        return None
    cluster: Cluster = await builder.get_cluster()
    assert cluster.learners is not None
    # One folder for each model: several may be trained in a run.
    own = builder.checkpoints.relative_to(builder.run.checkpoints)
    folder = builder.run.path.absolute() / LEARNERS / own
    private_folder(folder)
    launcher = cluster.learners(_DESK, on_gpus=llm.device != "cpu")
    return Learners(launcher, settings.learners, folder, llm.device, cluster.turn)
