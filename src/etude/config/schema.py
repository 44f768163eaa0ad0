"""The whole config, validated."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, PrivateAttr, SerializeAsAny, field_validator, model_validator

from etude.config.component import (
    CHANGEABLE,
    ClusterConfig,
    DatasetConfig,
    EvaluatorConfig,
    LlmConfig,
    OutputFolder,
    RunBudget,
    ToolsConfig,
    TrackerConfig,
    WorkflowConfig,
)
from etude.config.document import KeyPath
from etude.config.finetuning import (
    FinetuneConfig,
    TrainerAdapterConfig,
    TrainerConfig,
    TrajectoryBuilderConfig,
)
from etude.core.errors import ConfigError

_PASSWORD = re.compile(r"//[^/@]*:[^/@]*@")


class StorageConfig(BaseModel, extra="forbid", frozen=True):
    """Where the journal and the weights of a run are backed up, and when."""

    address: Annotated[str, CHANGEABLE]
    """The folder for all runs, with one subfolder each: `s3://bucket/etude`, `gs://…`, `file:///mnt/…`, or
    another address that fsspec has a driver for."""
    options: Annotated[dict[str, Annotated[Any, CHANGEABLE]], CHANGEABLE] = Field(default_factory=dict)
    """Arguments of fsspec's driver. Give credentials in the environment, as the driver reads them, or as
    `${NAME}`."""
    interval: Annotated[float, CHANGEABLE] = Field(default=60.0, gt=0)
    """Seconds from one copy to the next, if there is new data."""

    @model_validator(mode="before")
    @classmethod
    def _accept_bare_address(cls, value: Any) -> Any:
        return {"address": value} if isinstance(value, str) else value

    @field_validator("address")
    @classmethod
    def _check_address(cls, address: str) -> str:
        if "://" not in address:
            example = (
                f"file://{address}" if address.startswith("/") else "file:///mnt/backup, s3://bucket/etude"
            )
            raise ValueError(f"an address begins with its scheme, as in {example}")
        if _PASSWORD.search(address):
            raise ValueError("no password in an address: give it as an option, `password: ${NAME}`")
        return address.rstrip("/")


class EvalGeneralConfig(BaseModel, extra="forbid", frozen=True):
    """How episodes are run, in training and in evaluation."""

    max_concurrency: Annotated[int, CHANGEABLE] = Field(default=8, ge=1)
    """Episodes that run at the same time."""
    output_dir: OutputFolder | None = None
    """A folder that also gets the results of `etude evaluate`: `evaluation.json` and `items.jsonl`."""
    dataset: SerializeAsAny[DatasetConfig] | None = None
    """The examples: a file, `module:function`, or a dataset component."""
    timeout: Annotated[float, CHANGEABLE] = Field(default=300.0, gt=0)
    """Seconds that an episode may take."""
    max_calls: Annotated[int, CHANGEABLE] = Field(default=1000, ge=1)
    """Model calls that an episode may make."""
    isolation: Annotated[Literal["none", "process"], CHANGEABLE] = "none"
    """Where episodes run and are scored. `none`: in the process of the run. `process`: in other processes;
    code that crashes, blocks or takes too much memory then ends only its process and its episode."""
    runners: Annotated[int | None, CHANGEABLE] = Field(default=None, ge=1)
    """Processes for `isolation: process`; by default one per core, and at most `max_concurrency`."""
    runner_memory: Annotated[float | None, CHANGEABLE] = Field(default=None, gt=0)
    """Gigabytes that each of these processes may allocate (on Linux). Code that asks for more gets a
    MemoryError. By default there is no limit."""

    @model_validator(mode="after")
    def _check_runners(self) -> EvalGeneralConfig:
        for name in ("runners", "runner_memory"):
            if self.isolation != "process" and getattr(self, name) is not None:
                raise ValueError(f"`{name}` is for processes that play episodes: set isolation: process too")
        return self


class EvalConfig(BaseModel, extra="forbid", frozen=True):
    """Examples, and the evaluators that score the episodes."""

    general: EvalGeneralConfig = Field(default_factory=EvalGeneralConfig)
    """How episodes are run, and on which examples."""
    evaluators: dict[str, SerializeAsAny[EvaluatorConfig]] = Field(default_factory=dict)
    """The evaluators that score an episode, by name."""


class StallConfig(BaseModel, extra="forbid", frozen=True):
    """When a run without progress ends."""

    say_after: ClassVar[float] = 120.0
    """Seconds without progress after which the run says what it waits for. It repeats this each time that
    the seconds have doubled."""
    end_after: Annotated[float | None, CHANGEABLE] = Field(default=3600.0, gt=0)
    """Seconds without progress after which the run ends, to be resumed; at least twice an episode's
    `timeout`. Null for never. Training jobs are limited by the trainer's `job_timeout` instead."""


class Config(BaseModel, extra="forbid", frozen=True):
    """A config file, with every component's own class in place and every default filled in."""

    llms: dict[str, SerializeAsAny[LlmConfig]] = Field(default_factory=dict)
    """The models that agents call, by name."""
    workflow: SerializeAsAny[WorkflowConfig] | None = None
    """The agent: `module:function`, or a workflow component."""
    tools: dict[str, SerializeAsAny[ToolsConfig]] = Field(default_factory=dict)
    """Tools that agents call, by the names of the sets: `episode.tools("search")`."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Examples and scores."""
    trajectory_builders: dict[str, SerializeAsAny[TrajectoryBuilderConfig]] = Field(default_factory=dict)
    """The builder that turns episodes into training data; by default `grpo`."""
    trainer_adapters: dict[str, SerializeAsAny[TrainerAdapterConfig]] = Field(default_factory=dict)
    """Where training happens; by default `local`, in this process."""
    trainers: dict[str, SerializeAsAny[TrainerConfig]] = Field(default_factory=dict)
    """The loop over epochs; by default `epochs`."""
    cluster: Annotated[SerializeAsAny[ClusterConfig] | None, CHANGEABLE] = None
    """The machines that play the episodes, and train; by default this process does."""
    finetuning: FinetuneConfig = Field(default_factory=FinetuneConfig)
    """The model to train, and for how long."""
    budget: Annotated[RunBudget | None, CHANGEABLE] = None
    """The most that the run may consume; by default there is no limit."""
    stall: Annotated[StallConfig, CHANGEABLE] = Field(default_factory=StallConfig)
    """When a run without progress ends, to be resumed: after `end_after` seconds (3600; null: never), and at
    least twice an episode's `timeout`. Training jobs have the trainer's `job_timeout` instead."""
    storage: Annotated[StorageConfig | None, CHANGEABLE] = None
    """Where the run is backed up while it runs, against the loss of its machine: an address or a block."""

    report: Annotated[list[SerializeAsAny[TrackerConfig]], CHANGEABLE] = Field(default_factory=list)
    """Trackers that show the run while it runs, one or several; by default it is only in its folder."""

    _as_written: dict[KeyPath, str] = PrivateAttr(default_factory=dict)
    """Text that `resolved_yaml` writes instead of a value: references to the environment, import paths."""

    _untrainable: ConfigError | None = PrivateAttr(default=None)

    def check_training(self) -> None:
        """Raise ConfigError for problems that matter only in training."""
        if self._untrainable is not None:
            raise self._untrainable
