"""The `finetuning` block and the bases of the three component configs.

Names and defaults are those of the NeMo Agent Toolkit harness, with every bound checked.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, model_validator

from etude.config.component import ComponentConfig, DatasetConfig


class RewardFunctionConfig(BaseModel):
    """Names the evaluator whose score is the reward."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(description="An entry of `eval.evaluators`.")


class TrainerConfig(ComponentConfig):
    """Base of trainer configs: an entry of `trainers`."""

    reward: RewardFunctionConfig | None = Field(
        default=None, description="Set from `finetuning.reward_function`; leave it out."
    )


class TrajectoryBuilderConfig(ComponentConfig):
    """Base of trajectory builder configs: an entry of `trajectory_builders`."""

    reward: RewardFunctionConfig | None = Field(
        default=None, description="Set from `finetuning.reward_function`; leave it out."
    )


class TrainerAdapterConfig(ComponentConfig):
    """Base of trainer adapter configs: an entry of `trainer_adapters`."""

    reward: RewardFunctionConfig | None = Field(
        default=None, description="Set from `finetuning.reward_function`; leave it out."
    )


class CurriculumLearningConfig(BaseModel):
    """Train on the easiest groups first, and widen."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = Field(default=False, description="Filter groups by difficulty.")
    initial_percentile: float = Field(
        default=0.3, gt=0, le=1, description="Share of groups trained on at the start."
    )
    increment_percentile: float = Field(default=0.2, gt=0, le=1, description="Share added at each expansion.")
    expansion_interval: int = Field(
        default=5, ge=1, description="Epochs trained at a percentile before the next expansion."
    )
    min_reward_diff: float = Field(
        default=0.1,
        ge=0,
        description="Groups whose best and worst reward differ by less teach nothing and are left out.",
    )
    sort_ascending: bool = Field(
        default=False, description="False: high average reward (easy) first. True: hard first."
    )
    random_subsample: float | None = Field(
        default=None, gt=0, le=1, description="Keep at most this share of the groups, drawn at random."
    )


class FinetuneRunConfig(BaseModel):
    """How the runs of the workflow are evaluated while training."""

    model_config = ConfigDict(extra="forbid")

    config_file: Path | None = Field(default=None, description="Set to the file that was loaded.")
    dataset: str | Path | SerializeAsAny[DatasetConfig] | None = Field(
        default=None, description="In place of `eval.general.dataset`."
    )
    validation_dataset: str | Path | SerializeAsAny[DatasetConfig] | None = Field(
        default=None, description="Held-out examples; without them there is no validation."
    )
    validation_interval: int = Field(
        default=5, ge=1, description="Validate before training, every n epochs, and at the end."
    )


class FinetuneConfig(BaseModel):
    """The `finetuning` block."""

    model_config = ConfigDict(extra="forbid")

    enabled: bool = Field(default=False, description="Must be true to train.")
    trainer: str | None = Field(default=None, description="An entry of `trainers`.")
    trajectory_builder: str | None = Field(default=None, description="An entry of `trajectory_builders`.")
    trainer_adapter: str | None = Field(default=None, description="An entry of `trainer_adapters`.")
    reward_function: RewardFunctionConfig | None = Field(
        default=None, description="The evaluator that counts; may be left out when there is only one."
    )
    target_functions: list[str] = Field(
        default_factory=lambda: ["<workflow>"],
        min_length=1,
        description="Functions of the agent whose model calls are trained on.",
    )
    target_model: str | None = Field(
        default=None, description="The entry of `llms` to train; may be left out when there is only one."
    )
    curriculum_learning: CurriculumLearningConfig = Field(
        default_factory=CurriculumLearningConfig, description="Easy groups first."
    )
    num_epochs: int = Field(default=1, ge=1, description="How many times to collect and train.")
    output_dir: Path = Field(default=Path("runs"), description="Where run folders are made.")
    seed: int = Field(default=0, ge=0, description="Seed of every random choice of the run.")
    deterministic: bool = Field(
        default=False,
        description="Repeat bit for bit on a CPU, whatever is interrupted; a little slower.",
    )
    error_budget: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Share of an epoch's episodes or scores that may fail before the run stops.",
    )
    run_configuration: FinetuneRunConfig = Field(
        default_factory=FinetuneRunConfig, description="Validation and the dataset in use."
    )

    @model_validator(mode="after")
    def _targets_named_once(self) -> FinetuneConfig:
        if len(set(self.target_functions)) != len(self.target_functions):
            raise ValueError(f"target_functions names a function twice: {self.target_functions}")
        return self
