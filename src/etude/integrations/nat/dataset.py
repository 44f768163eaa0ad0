"""The dataset of a toolkit config as a dataset here: `_type: nat`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from etude.config.component import DatasetConfig
from etude.config.registry import register_dataset
from etude.integrations.nat.workflow import agent_of

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.integrations.nat.examples import NatDataset


class NatDatasetConfig(DatasetConfig, name="nat"):
    """`eval.general.dataset` in the toolkit config of the workflow."""

    file_path: Path | None = Field(
        default=None, description="Another file, with the same columns; its ending tells its format."
    )


@register_dataset(config_type=NatDatasetConfig)
async def nat_dataset(config: NatDatasetConfig, builder: Builder) -> AsyncIterator[NatDataset]:
    """Raises RequestError when the workflow is not the toolkit's."""
    agent = await agent_of(builder)
    from etude.integrations.nat.examples import NatDataset

    yield NatDataset(agent.config.eval.general, config.file_path)
