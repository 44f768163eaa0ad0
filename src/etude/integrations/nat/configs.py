"""What stands in the toolkit's config under `_type: etude_traj_builder` and its like."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nat.data_models.finetuning import TrainerAdapterConfig, TrainerConfig, TrajectoryBuilderConfig
from pydantic import ConfigDict, Field


class EtudeTrajectoryBuilderConfig(TrajectoryBuilderConfig, name="etude_traj_builder"):
    """Collects episodes with Etude's recorder."""

    model_config = ConfigDict(extra="forbid")

    builder: dict[str, Any] = Field(
        default_factory=dict, description="An entry of Etude's `trajectory_builders`; by default `grpo`."
    )


class EtudeTrainerAdapterConfig(TrainerAdapterConfig, name="etude_trainer_adapter"):
    """Trains with a backend of Etude's."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    adapter: dict[str, Any] = Field(
        default_factory=dict, description="An entry of Etude's `trainer_adapters`; by default `local`."
    )
    model: dict[str, Any] = Field(
        default_factory=dict,
        description="More keys of the trained model, as Etude's `llms` have them: its device, its provider.",
    )


class EtudeTrainerConfig(TrainerConfig, name="etude_trainer"):
    """Etude's loop over epochs, with what the toolkit's `finetuning` has no keys for."""

    model_config = ConfigDict(extra="forbid")

    trainer: dict[str, Any] = Field(
        default_factory=dict, description="Keys of Etude's trainer `epochs`, such as `patience`."
    )
    validation_dataset: Path | None = Field(
        default=None, description="Held-out examples, where --validation_dataset gives none."
    )
    seed: int | None = Field(default=None, description="`finetuning.seed` of Etude's.")
    deterministic: bool | None = Field(default=None, description="`finetuning.deterministic` of Etude's.")
    error_budget: float | None = Field(default=None, description="`finetuning.error_budget` of Etude's.")
    fine_tune_from_scratch: bool | None = Field(
        default=None, description="`finetuning.fine_tune_from_scratch` of Etude's."
    )
    timeout: float | None = Field(default=None, description="Seconds that an episode may take.")
    max_calls: int | None = Field(default=None, description="Model calls that an episode may make.")
