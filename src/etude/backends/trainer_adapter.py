"""The interface of trainer adapters, their capabilities and hyperparameters, and checks of both.

The config of the adapter `local` is here, so that it loads without the packages for training.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import pydantic.dataclasses
from pydantic import Field

from etude.algorithms.algorithm import Algorithm, changed_options, data_kind
from etude.algorithms.collecting import Collecting, TrajectoryBuilder
from etude.config.builder import Builder
from etude.config.component import CHANGEABLE, LlmConfig
from etude.config.finetuning import FinetuneConfig, LoraOptions, TrainerAdapterConfig
from etude.core.errors import CapabilityError
from etude.core.interfaces import wrap_implementations
from etude.core.job import ModelVersion, Skipped, TrainingJobRef, TrainingJobStatus, TrainingStatusEnum
from etude.core.sample import Kind, TrajectoryCollection
from etude.core.trajectory import Method
from etude.engines.local import OpponentsConfig
from etude.engines.openai_compatible import OpenAiLlmConfig
from etude.store.files import append_json_line

L = TypeVar("L", bound=LlmConfig)

_FIRST_PAUSE = 0.25
_BACKOFF = 1.5


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


@pydantic.dataclasses.dataclass(frozen=True, slots=True)
class Capabilities:
    """A backend's capabilities. The defaults forbid nothing, for adapters that declare none."""

    methods: frozenset[Method] = EVERY_KIND
    """The algorithms that it has losses for, by name or by kind. A kind (`samples`, `pairs`, `imitation`)
    stands for all algorithms that learn from such data, custom ones included."""
    options: frozenset[str] | None = None
    """The gradient options of algorithms that it accepts. None accepts all."""
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


class TrainerAdapter(ABC):
    """The interface to a training backend, which trains on trajectories in jobs.

    Open connections, models and processes in `initialize`, not in the constructor. A run wraps the adapter to
    record its jobs (`etude.loop.recording_wrappers`). A method whose return value does not match its declared
    type raises WrongReturnError.
    """

    run_config: FinetuneConfig
    """The `finetuning` block, set by `initialize`."""
    algorithm: Algorithm | None = None
    """The algorithm that the run trains with. It is set before `initialize`, and None outside of a run."""
    _highest_number = 0
    """The highest known version number. A job makes the next one, wherever it starts."""

    def __init__(self, adapter_config: TrainerAdapterConfig) -> None:
        """Keep the config. Nothing is started here."""
        self.adapter_config = adapter_config
        self.run_config = None  # type: ignore[assignment]  # the seed interface starts it as None
        self.job_log: Path | None = None
        """A file for facts about jobs that are logged without a folder. None keeps nothing."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make every implementation check its return values against the interface."""
        super().__init_subclass__(**kwargs)
        wrap_implementations(cls, TrainerAdapter)

    async def initialize(self, run_config: FinetuneConfig) -> None:
        """Prepare the backend. If that fails, raises an EtudeError that says what to do."""
        self.run_config = run_config
        self.adapter_config.reward = run_config.reward_function

    def capabilities(self) -> Capabilities:
        """Return the backend's capabilities, also before `initialize`, so that a bad config costs nothing."""
        return Capabilities()

    def charged_tokens(self, trajectories: TrajectoryCollection) -> int | None:
        """Return the most tokens that a job on the collection would be charged for, over all its epochs.
        Return None if training is not charged by the token.

        A run with a budget reserves that much before it submits the job.
        """
        return None

    def use_hyperparameters(self, hyperparameters: JobHyperparameters) -> None:
        """Set hyperparameters of the next jobs. Values that are not None replace the config's.

        Raises CapabilityError that names the values that the backend does not accept.
        """
        hyperparameters.refuse_all_but((), self.adapter_config.type_name)

    unhealthy_because: str | None = None
    """Why `is_healthy` last returned False, if the adapter knows."""

    @abstractmethod
    async def is_healthy(self) -> bool:
        """Return whether the backend answers and could train now."""

    @abstractmethod
    async def submit(self, trajectories: TrajectoryCollection) -> TrainingJobRef | Skipped:
        """Start a training job on the collection.

        `trajectories.run_id` names the job. Name and content together are its idempotency key: submitting the
        same again, from this process or a later one, must not train twice. Return the ref of the existing
        job. If its work was lost (a killed in-process job), start it again from the version last given to
        `restore`. If the name belongs to a job with other data, another method, other hyperparameters or
        another start model, raise JobNameTakenError. If the data are too few to train on, return Skipped with
        the reason. A collection of a method that the backend does not support raises CapabilityError.
        """

    @abstractmethod
    async def status(self, ref: TrainingJobRef) -> TrainingJobStatus:
        """Return the job's current status.

        A job unknown to the backend has the status NOT_FOUND. It is not an error, because a resumed run asks
        for jobs of a killed process. With the capability `versions`, a completed job has the `version` that
        it made. `metrics` in the metadata holds the numbers to show.
        """

    @abstractmethod
    async def wait_until_complete(
        self, ref: TrainingJobRef, poll_interval: float = 10.0
    ) -> TrainingJobStatus:
        """Wait for a final status and return it. `poll_interval` is in seconds.

        The trainer bounds the wait: it cancels the coroutine after a timeout. A backend in this process waits
        for the job itself and does not poll.
        """

    def log_progress(
        self, ref: TrainingJobRef, metrics: dict[str, Any], output_dir: str | None = None
    ) -> None:
        """Append facts about a job to `<backend>_jobs.jsonl` in `output_dir`, or to `job_log` by default."""
        path = self.job_log if output_dir is None else Path(output_dir) / f"{ref.backend}_jobs.jsonl"
        if path is not None:
            append_json_line(path, {"run_id": ref.run_id, **metrics})

    async def current_version(self) -> ModelVersion | None:
        """Return the weights that the next job starts from, or None if the backend does not say."""
        return None

    async def restore(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Make the next job start from `version`. Called when a run resumes, and before each job.

        A backend that keeps its own state needs nothing here.
        """

    async def count_from(self, number: int) -> None:
        """Number the next version higher than `number`. Numbers up to it are or were in use.

        Called before each job. A backend whose own numbers always rise needs nothing here.
        """
        self._highest_number = max(self._highest_number, number)

    async def begin_from(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Make `version`, which a warm-up made, the start of training instead of the base model.

        Called after the warm-up, and when such a run resumes. A backend that keeps an optimiser, a learning
        rate schedule or a reference model between jobs resets them to `version`.
        """

    async def damage(self, version: ModelVersion) -> list[str]:
        """Return how the stored files that a job needs to start from `version` differ from the written ones.

        The result has one clause per file, and is empty for an undamaged version. Called before `initialize`
        with the version that a run would resume from. A run goes back from a damaged version to the last
        undamaged one. A backend that keeps its own state needs nothing here.
        """
        return []

    async def go_back(self, version: ModelVersion) -> list[str]:
        """Set aside everything stored for versions after `version`. Their jobs are run again.

        Called before `initialize`. Return the new names.
        """
        return []

    async def keep(self, version: ModelVersion) -> None:  # noqa: B027  # a hook with a sound default
        """Make `version`, the best measured so far, survive the end of this process.

        A backend that stores each version when its job ends needs nothing here.
        """

    async def prune(self, keep: Collection[ModelVersion]) -> None:  # noqa: B027  # a hook with a sound default
        """Delete stored weights of this run's versions that are not in `keep`, never the base model.

        Doing nothing is allowed.
        """

    async def cancel(self, ref: TrainingJobRef) -> None:  # noqa: B027  # a hook with a sound default
        """Stop the job if it still runs. An unknown or finished job is not an error."""

    async def cleanup(self) -> None:  # noqa: B027  # a hook with a sound default
        """Free the resources of `initialize`. Calling it twice is fine."""


def pauses(usual: float, longest: float) -> Iterator[float]:
    """Yield the seconds between polls of a remote job, without end.

    They start short, for short jobs. After reaching `usual` they grow slowly to `longest`.
    """
    pause = min(_FIRST_PAUSE, usual)
    while True:
        yield pause
        pause = min(2 * pause, usual) if pause < usual else max(usual, min(pause * _BACKOFF, longest))


def job_status(ref: TrainingJobRef, status: TrainingStatusEnum, **more: Any) -> TrainingJobStatus:
    """Return a status for the job of `ref`, with `more` of its fields."""
    return TrainingJobStatus(run_id=ref.run_id, backend=ref.backend, status=status, **more)


def find_opponents(llms: Mapping[str, LlmConfig], model: str | None) -> list[str]:
    """Return the entries of `llms` that play versions of `model`."""
    return [name for name, llm in llms.items() if isinstance(llm, OpponentsConfig) and llm.of == model]


def check_method(
    backend: str, capabilities: Capabilities, method: Method, builder: str | None = None
) -> None:
    """Raise CapabilityError unless the backend can train with the algorithm, made by `builder` if given."""
    if {method, data_kind(method)} & capabilities.methods:
        return
    what = "the data are" if builder is None else f"the trajectory builder {builder} makes data"
    raise CapabilityError(
        f"{what} for the method '{method}', and the trainer adapter {backend} can do: "
        f"{', '.join(sorted(capabilities.methods)) or 'nothing'}. Choose another of these"
    )


def check_start(backend: str, capabilities: Capabilities, what: str) -> None:
    """Raise CapabilityError unless the backend can start a job from an earlier version, as `what` asks."""
    if not capabilities.from_base:
        raise CapabilityError(
            f"{what}, and the trainer adapter {backend} always continues from the last version. Leave that "
            "out, or choose another adapter"
        )


def check_run(
    backend: str,
    capabilities: Capabilities,
    builder: TrajectoryBuilder,
    block: FinetuneConfig,
    llms: Mapping[str, LlmConfig],
    model: str,
) -> None:
    """Raise CapabilityError if the backend cannot train `model`, an entry of `llms`, as a config asks."""
    name = builder.trajectory_builder_config.type_name or type(builder).__name__
    check_method(backend, capabilities, builder.method, f"'{name}'")
    if block.fine_tune_from_scratch:
        check_start(backend, capabilities, "'fine_tune_from_scratch' starts each job from the base model")
    for problem in _problems(capabilities, builder, block, llms, model):
        raise CapabilityError(f"the trainer adapter {backend} {problem}, or choose another adapter")


def _problems(
    capabilities: Capabilities,
    builder: TrajectoryBuilder,
    block: FinetuneConfig,
    llms: Mapping[str, LlmConfig],
    model: str,
) -> Iterator[str]:
    algorithm = builder.trajectory_builder_config
    if isinstance(algorithm, Algorithm):
        known = {*(capabilities.options or ()), *Collecting.model_fields}
        changed = changed_options(algorithm.objective())
        refused = [f"{name}: {value}" for name, value in changed.items() if name not in known]
        if refused and capabilities.options is not None:
            yield f"cannot be given {', '.join(refused)} of '{algorithm.type_name}': leave it out"
    if block.warm_up and not {"supervised", "imitation"} & capabilities.methods:
        yield "cannot imitate transcripts: leave out 'finetuning.warm_up'"
    if block.collect_ahead and not capabilities.versions:
        yield "does not say which weights its jobs make: leave out 'finetuning.collect_ahead'"
    if block.collect_ahead and not capabilities.samples_while_training:
        yield "may stop the engine while a job trains: leave out 'finetuning.collect_ahead'"
    players = find_opponents(llms, model)
    if players and not (capabilities.versions and capabilities.old_versions):
        yield f"keeps no earlier versions of '{model}' to sample from: leave out llms.{players[0]}"
    llm, kinds = llms.get(model), {builder.method, data_kind(builder.method)}
    if not kinds & capabilities.token_ids_for or not isinstance(llm, OpenAiLlmConfig):
        return
    if not llm.asks_for_token_ids:
        yield (
            f"needs token ids for the method '{builder.method}', and llms.{model} does not ask its endpoint "
            "for them. If that is vLLM (>= 0.10.2) or `etude serve`, say so: 'provider: vllm' or 'provider: "
            "etude'. With other endpoints, choose a builder for 'supervised' or 'dpo'"
        )
    if "imitation" not in kinds and not llm.asks_for_logprobs:
        yield f"needs logprobs for the method '{builder.method}': set 'logprobs: true' in llms.{model}"


def trained_model(builder: Builder, backend: str, kind: type[L]) -> L:
    """Return the target model's config. Raises CapabilityError if it is not what `backend` trains."""
    target = builder.config.finetuning.require_target()
    llm = builder.config.llms[target]
    if not isinstance(llm, kind):
        raise CapabilityError(
            f"the trainer adapter '{backend}' trains models of `_type: {kind.type_name}`, and llms.{target} "
            f"is `_type: {llm.type_name}`; make it {kind.type_name}, or choose an adapter for its backend"
        )
    return llm


LOCAL_CAPABILITIES = Capabilities(token_ids_for=EVERY_KIND, versions=True, from_base=True)
"""All algorithms, custom ones included, on token ids."""


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
    lora: LoraOptions | None = None
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

    def lora_with(self, given: JobHyperparameters) -> LoraOptions | None:
        """Return the config of the LoRA weights to train, or None for all weights."""
        rank, alpha = given.lora_rank, given.lora_alpha
        if rank is None:
            return self.lora
        if not rank:
            return None
        changes = {"r": rank} if alpha is None else {"r": rank, "alpha": alpha}
        return (self.lora or LoraOptions()).model_copy(update=changes)

    def for_job(self, kind: Kind, given: JobHyperparameters) -> Self:
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
