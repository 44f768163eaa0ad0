"""The `finetuning` block, and the bases of three kinds of component configs.

Names and defaults follow the NeMo Agent Toolkit harness. Every bound is checked.
"""

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, Field, SerializeAsAny, ValidationError, field_validator, model_validator

from etude.config.component import CHANGEABLE, AlarmConfig, ComponentConfig, DatasetConfig, OutputFolder
from etude.config.data_files import read_jsonl
from etude.config.import_path import import_object, is_import_path, user_code
from etude.core.data_model import DataModel, list_faults, name_type
from etude.core.episode import Example
from etude.core.errors import DatasetError, RequestError
from etude.core.message import Message, Tool
from etude.core.training_rows import SupervisedRow


class RewardFunctionConfig(DataModel, revalidate_instances="always"):
    """Names the evaluator whose score is the reward."""

    name: str
    """An entry of `eval.evaluators`."""


class _RewardedConfig(ComponentConfig):
    reward: RewardFunctionConfig | None = None
    """Set automatically from `finetuning.reward_function`; leave it out."""


class TrainerConfig(_RewardedConfig):
    """The base of trainer configs: an entry of `trainers`."""


class TrajectoryBuilderConfig(_RewardedConfig):
    """The base of trajectory builder configs: an entry of `trajectory_builders`."""


class TrainerAdapterConfig(_RewardedConfig):
    """The base of trainer adapter configs: an entry of `trainer_adapters`."""


class LoraOptions(BaseModel, extra="forbid"):
    """Train LoRA weights and freeze the model's own weights (Hu et al., 2021)."""

    r: int = Field(default=16, ge=1)
    """Rank."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale: updates are multiplied by alpha / r."""
    target_modules: list[str] | None = None
    """Names of linear layers for LoRA weights. Default: all but the head."""


class UntilConfig(DataModel, revalidate_instances="always"):
    """The measurement that ends a warm-up."""

    reward: float | None = None
    """End when the agent's mean reward on training examples reaches this."""
    loss: float | None = None
    """End when the loss falls to this, in nats for each token that the assistant said."""

    @model_validator(mode="after")
    def _check_measurement(self) -> Self:
        if (self.reward is None) == (self.loss is None):
            raise ValueError("set either `reward` or `loss`")
        return self

    def is_reached(self, value: float) -> bool:
        """Return whether a measurement ends the warm-up."""
        return value >= self.reward if self.reward is not None else value <= (self.loss or 0.0)

    def __str__(self) -> str:
        return f"reward {self.reward:g}" if self.reward is not None else f"loss {self.loss:g}"


class WarmUpConfig(DataModel, revalidate_instances="always"):
    """Imitate transcripts before training, until a measured value is reached or for a number of steps."""

    transcripts: str
    """A JSONL file with one conversation per line (`messages`, `tools`), or `module:function`. The function
    gets the training examples, and the run's seed if it has a parameter `seed`. It returns conversations."""
    until: UntilConfig | None = None
    """The measurement that ends the warm-up: `{reward: 0.3}` or `{loss: 0.5}`. The number of steps then
    differs from seed to seed."""
    steps: int | None = Field(default=None, ge=1)
    """A fixed number of optimiser steps, in one job, instead of `until`."""
    learning_rate: float | None = Field(default=None, gt=0)
    """The learning rate of all steps; by default the adapter's, with its schedule."""
    batch_size: int = Field(default=32, ge=1)
    """Transcripts per optimiser step."""
    check_every: int = Field(default=20, ge=1)
    """Steps between measurements. Each stretch is a job, and makes a version."""
    max_steps: int = Field(default=5000, ge=1)
    """Steps after which `until` counts as out of reach."""
    examples: ClassVar[int] = 256
    """The most training examples to measure the reward on: the first ones."""

    @field_validator("transcripts", mode="before")
    @classmethod
    def _require_name(cls, value: Any) -> str:
        if not isinstance(value, str | Path):
            raise ValueError(
                f"expected a JSONL file, or a function as `module:name`, found {name_type(value)}; write "
                "conversations into a file, one on each line"
            )
        return str(value)

    @model_validator(mode="after")
    def _check_end(self) -> Self:
        if (self.until is None) == (self.steps is None):
            raise ValueError("set either `until` or `steps`: one of them ends the warm-up")
        return self

    def next_steps(self, done: int) -> int:
        """Return the optimiser steps of the next job, after `done` steps; 0 if no more are due."""
        if self.steps is not None:
            return self.steps - done
        return min(self.check_every, self.max_steps - done)


@dataclass(frozen=True, slots=True)
class Transcript:
    """A finished conversation to imitate."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    where: str = ""
    """The place that it was read from: `file:line`."""


def read_transcripts(source: str, examples: Sequence[Example], seed: int) -> list[Transcript]:
    """Read the conversations of a file or a function. Raises DatasetError, which names the line or number of
    an invalid conversation."""
    if is_import_path(source):
        transcripts = [
            _check_transcript(f"{source}: transcript {n}", row)
            for n, row in _call_function(source, examples, seed)
        ]
    else:
        transcripts = [_check_transcript(where, row) for where, row in read_jsonl(Path(source))]
    if not transcripts:
        raise DatasetError(f"{source}: there are no transcripts to imitate")
    return transcripts


def _call_function(source: str, examples: Sequence[Example], seed: int) -> Iterator[tuple[int, Any]]:
    function = import_object(source)
    with user_code(DatasetError, f"{source} failed"):
        parameters = [*inspect.signature(function).parameters.values()]
        wanted: dict[str, Any] = {"seed": seed} if any(each.name == "seed" for each in parameters) else {}
        given = [list(examples)] if any(each.name != "seed" for each in parameters) else []
        rows = function(*given, **wanted)
        if isinstance(rows, Mapping | str) or not isinstance(rows, Iterable):
            raise DatasetError(f"{source} must give an iterable of conversations, found {rows!r:.80}")
        yield from enumerate(rows, start=1)


def _check_transcript(where: str, row: Any) -> Transcript:
    """Return the conversation of a row: only its messages, or an object with `messages` and `tools`."""
    content = {"messages": row} if isinstance(row, list | tuple) else row
    try:
        checked = SupervisedRow.model_validate(content)
    except ValidationError as error:
        raise DatasetError(f"{where}: {list_faults(error)}") from error
    return Transcript([message.to_wire() for message in checked.messages], checked.tools or (), where)


class CurriculumLearningConfig(DataModel, revalidate_instances="always"):
    """Train on the easiest groups first, and then on more."""

    enabled: bool = False
    """Filter groups by difficulty."""
    initial_percentile: float = Field(default=0.3, gt=0, le=1)
    """Share of groups to train on at the start."""
    increment_percentile: float = Field(default=0.2, gt=0, le=1)
    """Share added at each expansion."""
    expansion_interval: int = Field(default=5, ge=1)
    """Epochs trained at a percentile before the next expansion."""
    min_reward_diff: float = Field(default=0.1, ge=0)
    """Groups whose best and worst reward differ by less are left out, because they teach nothing."""
    sort_ascending: bool = False
    """False: high average reward (easy) first. True: hard first."""
    random_subsample: float | None = Field(default=None, gt=0, le=1)
    """Keep at most this share of the groups, drawn at random."""


class FinetuneRunConfig(DataModel, revalidate_instances="always"):
    """How the workflow is evaluated during training."""

    config_file: Path | None = None
    """Set automatically to the file that was loaded."""
    dataset: str | Path | SerializeAsAny[DatasetConfig] | None = None
    """Examples that replace `eval.general.dataset`."""
    validation_dataset: str | Path | SerializeAsAny[DatasetConfig] | None = None
    """Held-out examples; without them there is no validation."""
    validation_interval: int = Field(default=5, ge=1)
    """Validate before training, every n epochs, and at the end."""


class TargetConfig(DataModel, revalidate_instances="always"):
    """One of several models that one run trains. Keys that you leave out are as in `finetuning`."""

    model: str | None = None
    """The entry of `llms` to train; by default the one with the target's name."""
    trajectory_builder: str | None = None
    """An entry of `trajectory_builders`."""
    trainer_adapter: str | None = None
    """An entry of `trainer_adapters`."""
    reward_function: RewardFunctionConfig | None = None
    """The evaluator that is this model's reward."""
    target_functions: list[str] | None = Field(default=None, min_length=1)
    """Functions of the agent whose model calls are trained on; all by default."""
    curriculum_learning: CurriculumLearningConfig | None = None
    """Train on easy groups first."""
    warm_up: WarmUpConfig | None = None
    """Transcripts that this model imitates before it is trained."""
    fine_tune_from_scratch: bool | None = None
    """Start each job from the base model, and not from the last version."""
    every: int = Field(default=1, ge=1)
    """Train only in every n-th epoch, to alternate."""
    offset: int = Field(default=0, ge=0)
    """Epochs to wait before its first training."""
    frozen: bool = False
    """Never train it. Its reward in validations is still reported."""

    def reason_to_rest(self, epoch: int) -> str | None:
        """Return why the model is not due for training in an epoch (from 0), or None if it is."""
        if self.frozen:
            return "frozen"
        if epoch < self.offset or (epoch - self.offset) % self.every:
            return f"not its turn (every: {self.every}, offset: {self.offset})"
        return None


SHIPPED = {"trainer": "epochs", "trajectory_builder": "grpo", "trainer_adapter": "local"}
"""The components of an enabled block that names none, and of a config that has no section for them."""


class FinetuneConfig(DataModel, revalidate_instances="always"):
    """The `finetuning` block.

    If it is enabled, the components that it leaves out are the ones in `SHIPPED`. In a config file whose
    section has one other component, that one is used instead.
    """

    enabled: bool = False
    """Set this to true to train."""
    trainer: str | None = None
    """An entry of `trainers`; may be left out if there is only one."""
    trajectory_builder: str | None = None
    """An entry of `trajectory_builders`; may be left out if there is only one."""
    trainer_adapter: str | None = None
    """An entry of `trainer_adapters`; may be left out if there is only one."""
    reward_function: RewardFunctionConfig | None = None
    """The evaluator that is the reward; may be left out if there is only one."""
    target_functions: list[str] = Field(default_factory=lambda: ["<workflow>"], min_length=1)
    """Functions of the agent whose model calls are trained on; `*` for all. Protocols default to all."""
    target_model: str | None = None
    """The entry of `llms` to train; may be left out if there is only one."""
    targets: dict[str, TargetConfig] = Field(default_factory=dict)
    """Several models to train in one run, by names that you choose, instead of `target_model`."""
    curriculum_learning: CurriculumLearningConfig = Field(default_factory=CurriculumLearningConfig)
    """Train on easy groups first."""
    warm_up: WarmUpConfig | None = None
    """Transcripts that the model imitates before it is measured and trained."""
    fine_tune_from_scratch: bool = False
    """Start each job from the base model, and not from the last version."""
    collect_ahead: bool = False
    """Collect the next epoch's episodes while a job trains, from the weights before it. These are then one
    update old, never more."""
    num_epochs: Annotated[int, CHANGEABLE] = Field(default=1, ge=1)
    """Number of times to collect and train."""
    output_dir: OutputFolder = Path("runs")
    """The folder in which run folders are made."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of every random choice of the run."""
    deterministic: bool = False
    """Repeat bit for bit on a CPU, even after interruptions; a little slower."""
    error_budget: Annotated[float, CHANGEABLE] = Field(default=0.2, ge=0, le=1)
    """Share of an epoch's episodes or scores that may fail before the run stops."""
    alarms: Annotated[dict[str, SerializeAsAny[AlarmConfig]], CHANGEABLE] = Field(default_factory=dict)
    """Changed or additional alarms, by name. Set an action (`off`, `warn`, `stop`), or
    thresholds too. Alarms that you do not name are on, and warn. `alarms: off` turns all off."""
    run_configuration: FinetuneRunConfig = Field(default_factory=FinetuneRunConfig)
    """Validation and the dataset in use."""

    @field_validator("run_configuration", mode="before")
    @classmethod
    def _read_none_as_default(cls, value: Any) -> Any:
        return FinetuneRunConfig() if value is None else value

    @model_validator(mode="after")
    def _fill_in_defaults(self) -> Self:
        for key, name in SHIPPED.items():
            if self.enabled and getattr(self, key) is None:
                self.__dict__[key] = name
                self.__pydantic_fields_set__.discard(key)
        return self

    @property
    def reward_name(self) -> str | None:
        """The evaluator that is the reward; None if none is named."""
        return None if self.reward_function is None else self.reward_function.name

    def require_reward(self) -> str:
        """Return the evaluator that is the reward. Raises RequestError if none is named."""
        if self.reward_name is None:
            raise RequestError(
                "no reward function: name an evaluator under 'finetuning.reward_function.name'"
            )
        return self.reward_name

    def require_target(self) -> str:
        """Return the entry of `llms` to train. Raises RequestError if none is named."""
        if self.target_model is None:
            raise RequestError("'finetuning.target_model' is missing: name the entry of `llms` to train")
        return self.target_model

    def chosen_component(self, key: str) -> str | None:
        """Return the component that the block names under `key`; None if the block leaves it out."""
        name: str | None = getattr(self, key) if key in self.model_fields_set else None
        return name

    def for_target(self, name: str) -> Self:
        """Return the block as it would be if `name` were the only model that is trained.

        Raises KeyError if there is no such target.
        """
        target = self.targets[name]
        keys = TargetConfig.model_fields.keys() & FinetuneConfig.model_fields.keys()
        target_options = {key: value for key, value in target if value is not None and key in keys}
        return self.model_copy(update={**target_options, "target_model": target.model, "targets": {}})
