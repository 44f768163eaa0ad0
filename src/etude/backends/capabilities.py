"""A training backend's capabilities, the hyperparameters it accepts, and checks of both.

The config of the adapter `local` is here, so that it loads without the packages for training.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from etude.algorithms.algorithm import Algorithm, changed_options, data_kind, gradient_fields
from etude.config.component import CHANGEABLE, LlmConfig
from etude.config.finetuning import FinetuneConfig, TrainerAdapterConfig
from etude.core.errors import CapabilityError
from etude.core.sample import Kind
from etude.core.trajectory import Method
from etude.engines.local import OpponentsConfig
from etude.engines.openai_compatible import OpenAiLlmConfig

EVERY_KIND: frozenset[Method] = frozenset({"samples", "pairs", "imitation"})
"""All algorithms, by the kind of data that they learn from."""


@dataclass(frozen=True, slots=True)
class JobHyperparameters:
    """Hyperparameters for jobs. None keeps the value of the adapter's config."""

    num_epochs: int | None = None
    """The number of passes of a job over its data."""
    rl_learning_rate: float | None = None
    """The learning rate of all algorithms except imitation."""
    dpo_beta: float | None = None
    """The strength of the pull to the reference model, in `dpo`."""
    lora_rank: int | None = None
    """Rank of the LoRA weights. 0 trains all weights."""
    lora_alpha: float | None = None
    """Scale of the LoRA weights."""
    learning_rate: float | None = None
    """The learning rate of all algorithms, constant over a job's steps."""
    batch_size: int | None = None
    """Rows per optimiser step."""

    def given_values(self) -> dict[str, Any]:
        """Return the values that are not None, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def refuse_all_but(self, known: Collection[str], backend: str) -> None:
        """Raise CapabilityError if a value is given whose name is not in `known`."""
        refused = [f"{name} ({value})" for name, value in self.given_values().items() if name not in known]
        if refused:
            raise CapabilityError(
                f"the trainer adapter '{backend}' cannot be given {', '.join(refused)}: leave it out, or "
                "choose another adapter" + (f". It can be given {', '.join(sorted(known))}" if known else "")
            )

    def for_api(self, method: Method) -> dict[str, Any]:
        """Return the values under the fine-tuning API's names, for a job of the method."""
        named: dict[str, Any] = {
            "n_epochs": self.num_epochs,
            "batch_size": self.batch_size,
            "lora_rank": self.lora_rank,
            "lora_alpha": self.lora_alpha,
        }
        if data_kind(method) != "imitation":
            named["learning_rate"] = self.rl_learning_rate
        if data_kind(method) == "pairs":
            named["beta"] = self.dpo_beta
        if self.learning_rate is not None:
            named["learning_rate"] = self.learning_rate
        return {name: value for name, value in named.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """A backend's capabilities. The defaults forbid nothing, for adapters that declare none."""

    methods: frozenset[Method] = EVERY_KIND
    """The algorithms that it has losses for, by name or by kind. A kind (`samples`, `pairs`, `imitation`)
    stands for all algorithms that learn from such data, custom ones included."""
    options: frozenset[str] | None = None
    """The gradient options of algorithms that it accepts. None accepts all."""
    measures: bool = True
    """Whether it accepts options for which a learner in this process must measure something."""
    token_ids_for: frozenset[Method] = frozenset()
    """Algorithms or kinds that need the sampled token ids, and except for imitation their logprobs. Text is
    not enough for them."""
    versions: bool = False
    """Whether a completed job's status has its `version`. Without it, the engine cannot adopt the weights and
    their change is not checked."""
    from_base: bool = False
    """Whether, after `restore`, a job can start from an earlier version, above all the base model. New
    versions still get higher numbers."""
    samples_while_training: bool = True
    """Whether the engine keeps sampling from the previous weights while a job trains."""
    old_versions: bool = True
    """Whether the engine can sample from earlier versions next to the last one (`_type: opponents`)."""


def check_from_base(backend: str, capabilities: Capabilities) -> None:
    """Raise CapabilityError unless the backend can start each job from the base model."""
    if not capabilities.from_base:
        raise CapabilityError(
            f"'fine_tune_from_scratch' asks for jobs that start from the base model, and the trainer adapter "
            f"{backend} always continues from the last version. Remove the key, or choose another adapter."
        )


def find_opponents(llms: Mapping[str, LlmConfig], model: str) -> list[str]:
    """Return the entries of `llms` that play versions of `model`."""
    return [name for name, llm in llms.items() if isinstance(llm, OpponentsConfig) and llm.of == model]


def check_opponents(
    backend: str, capabilities: Capabilities, llms: Mapping[str, LlmConfig], model: str
) -> None:
    """Raise CapabilityError if `llms` has entries that play versions of `model`, and none are kept."""
    players = find_opponents(llms, model)
    if players and not (capabilities.versions and capabilities.old_versions):
        raise CapabilityError(
            f"llms.{players[0]} plays earlier versions of '{model}', and the trainer adapter {backend} "
            "does not keep any that could be sampled from. Remove the entry, or choose another adapter: "
            "`local`, `lm_server` and `openai` do"
        )


def check_start_version(backend: str, capabilities: Capabilities, start: int, newest: int) -> None:
    """Raise CapabilityError unless the backend can start a job from `start` when `newest` is later."""
    if start < newest and not capabilities.from_base:
        raise CapabilityError(
            f"the next job is to start from version {start}, and the trainer adapter {backend} always goes "
            f"on from the last one, which is {newest}. Go back to that, or choose another adapter."
        )


def check_block(backend: str, capabilities: Capabilities, block: FinetuneConfig) -> None:
    """Raise CapabilityError if a key of the `finetuning` block asks for what the backend cannot do."""
    if block.warm_up and not {"supervised", "imitation"} & capabilities.methods:
        raise CapabilityError(
            f"'finetuning.warm_up' imitates transcripts, which the trainer adapter {backend} cannot do. "
            "Remove the key, or choose another adapter: `local`, `lm_server` and `openai` can"
        )
    if block.collect_ahead and not capabilities.versions:
        raise CapabilityError(
            f"'finetuning.collect_ahead' trains on episodes of the weights before, and the trainer adapter "
            f"{backend} does not say which weights its jobs make. Remove the key, or choose another."
        )
    if block.collect_ahead and not capabilities.samples_while_training:
        raise CapabilityError(
            f"'finetuning.collect_ahead' asks to sample while a job trains, and with the trainer adapter "
            f"{backend}, as it is set, the engine may be away then. Remove one of the two."
        )


def check_method(
    backend: str, capabilities: Capabilities, method: Method, builder: str | None = None
) -> None:
    """Raise CapabilityError unless the backend can train with the algorithm, made by `builder` if given."""
    if {method, data_kind(method)} & capabilities.methods:
        return
    can = f"the trainer adapter {backend} can do: {', '.join(sorted(capabilities.methods)) or 'nothing'}"
    if builder is None:
        raise CapabilityError(f"the data are for the method '{method}', and {can}. Choose another of these")
    raise CapabilityError(
        f"the trajectory builder {builder} makes data for the method '{method}', and {can}. Choose another "
        "builder or adapter under 'finetuning'."
    )


def check_options(backend: str, capabilities: Capabilities, config: object) -> None:
    """Raise CapabilityError for options of an algorithm's config that the backend would ignore."""
    if not isinstance(config, Algorithm):
        return
    taken = capabilities.options
    shared = {*gradient_fields(type(config))}
    refused = [
        f"{name}: {value}"
        for name, value in changed_options(config).items()
        if (taken is not None and name not in taken) or (not capabilities.measures and name not in shared)
    ]
    if refused:
        raise CapabilityError(
            f"the trainer adapter {backend} cannot be given {', '.join(refused)} of the trajectory builder "
            f"'{config.type_name}': leave it out, or choose another adapter"
        )


def check_tokens(
    backend: str, capabilities: Capabilities, method: Method, llm: LlmConfig, model: str
) -> None:
    """Raise CapabilityError if training needs tokens that the model's endpoint does not return.

    `method` is the method of the data. `llm` is the entry `model` of `llms`.
    """
    needed = {method, data_kind(method)} & capabilities.token_ids_for
    if not needed or not isinstance(llm, OpenAiLlmConfig):
        return
    needs = f"the trainer adapter {backend} needs token ids for the method '{method}'"
    if not llm.asks_for_token_ids:
        raise CapabilityError(
            f"{needs}, and llms.{model} does not ask its endpoint for them. If that is vLLM (>= 0.10.2) or "
            "`etude serve`, say so: 'provider: vllm' or 'provider: etude'. Other endpoints "
            "return only text: choose a builder for 'supervised' or 'dpo'"
        )
    if data_kind(method) != "imitation" and not llm.asks_for_logprobs:
        raise CapabilityError(
            f"{needs} and their logprobs, and llms.{model} does not ask for logprobs; set 'logprobs: true'"
        )


LOCAL_CAPABILITIES = Capabilities(token_ids_for=EVERY_KIND, versions=True, from_base=True)
"""All algorithms, custom ones included, on token ids."""


class LoraConfig(BaseModel, extra="forbid"):
    """Train LoRA weights and freeze the model's own weights (Hu et al., 2021)."""

    r: int = Field(default=16, ge=1)
    """Rank."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: updates are multiplied by alpha / r."""
    target_modules: list[str] | None = None
    """Names of linear layers for LoRA weights. Default: all but the head."""


class LocalAdapterConfig(TrainerAdapterConfig, name="local"):
    """Train the model that the agents sample from, in this process or on the nodes of a cluster."""

    learning_rate: float | None = Field(default=None, gt=0)
    """The highest learning rate of AdamW in the run. Default: 3e-4 for LoRA weights, 1e-5 for all weights."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 by the end of the run. If every job starts from the base model, it
    falls to 0 by the end of each job. `constant` keeps it."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The weight decay of AdamW."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the learning rate rises from 0."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are clipped to this norm."""
    batch_size: int | None = Field(default=None, ge=1)
    """Trajectories (or pairs) per optimiser step. Default: all of an epoch."""
    passes: int = Field(default=1, ge=1)
    """The number of passes over an epoch's trajectories."""
    token_budget: Annotated[int | None, CHANGEABLE] = Field(default=None, ge=1)
    """Tokens in a pass through the model. More need more memory and save time. Default: 16384, on a CPU fewer
    to keep about 1.2 GB for the gradient (1929 for 135 million parameters), but at least 1024."""
    gradient_checkpointing: Annotated[bool | None, CHANGEABLE] = None
    """Recompute the insides of layers for the gradient instead of keeping them. This saves memory and takes
    up to a third more time. Default: only once a GPU's memory has run out."""
    lora: LoraConfig | None = None
    """Train LoRA weights. Default: train all weights."""
    shard_training: Annotated[bool, CHANGEABLE] = False
    """With `cluster.learners`: give each learner only a part of the weights and of the optimiser state."""
    checkpoint_steps: Annotated[int, CHANGEABLE] = Field(default=10, ge=1)
    """With `cluster.learners`: optimiser steps between two checkpoints that a job can resume from."""

    checkpoint_seconds: Annotated[float | None, CHANGEABLE] = Field(default=None, ge=0)
    """Seconds between two versions written to disk; the best and the last are always written. 0 writes each
    before its job ends. After a kill, unwritten versions are trained again on the recorded episodes. Default:
    60 if a version with its optimiser state takes more than 64 MB, otherwise 0."""

    @property
    def rate(self) -> float:
        """The learning rate, with its default."""
        return self.learning_rate or (1e-5 if self.lora is None else 3e-4)

    def lora_with(self, given: JobHyperparameters) -> LoraConfig | None:
        """Return the config of the LoRA weights to train, or None for all weights."""
        rank, alpha = given.lora_rank, given.lora_alpha
        if rank is None:
            return self.lora
        if not rank:
            return None
        changes = {"r": rank} if alpha is None else {"r": rank, "alpha": alpha}
        return (self.lora or LoraConfig()).model_copy(update=changes)

    def for_job(self, kind: Kind, given: JobHyperparameters) -> LocalAdapterConfig:
        """Return the config for a job on this kind of data, with the given hyperparameters applied."""
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
