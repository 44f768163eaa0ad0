"""The plug-in that the toolkit imports by its entry point `nat.components`: registers Etude with it.

torch and what else trains is loaded when a run is opened, and not here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from nat.builder.builder import Builder
from nat.cli.register_workflow import (
    register_trainer,
    register_trainer_adapter,
    register_trajectory_builder,
)

import etude.integrations.nat.agent  # noqa: F401 - registers the model that is trained
from etude.integrations.nat.parts import (
    EtudeTrainerAdapter,
    EtudeTrainerAdapterConfig,
    EtudeTrainerConfig,
    EtudeTrajectoryBuilder,
    EtudeTrajectoryBuilderConfig,
)
from etude.integrations.nat.trainer import EtudeTrainer

# Generators run for every workflow that the toolkit builds, and are closed before anything is trained:
# what they yield holds nothing yet.


@register_trajectory_builder(config_type=EtudeTrajectoryBuilderConfig)
async def etude_traj_builder(
    config: EtudeTrajectoryBuilderConfig, builder: Builder
) -> AsyncIterator[EtudeTrajectoryBuilder]:
    """The component `etude_traj_builder`."""
    yield EtudeTrajectoryBuilder(config)


@register_trainer_adapter(config_type=EtudeTrainerAdapterConfig)
async def etude_trainer_adapter(
    config: EtudeTrainerAdapterConfig, builder: Builder
) -> AsyncIterator[EtudeTrainerAdapter]:
    """The component `etude_trainer_adapter`."""
    yield EtudeTrainerAdapter(config)


@register_trainer(config_type=EtudeTrainerConfig)
async def etude_trainer(config: EtudeTrainerConfig, builder: Builder) -> AsyncIterator[EtudeTrainer]:
    """The component `etude_trainer`."""
    yield EtudeTrainer(config)
