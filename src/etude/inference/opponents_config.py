"""The config of a seat that earlier versions of a trained model play: `_type: opponents`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from etude.config.component import LlmConfig
from etude.config.references import LlmRef


class OpponentsConfig(LlmConfig, name="opponents"):
    """Earlier versions of a model that is trained: one of a pool is drawn for each episode.

    The version that training began with is always in the pool, and plays in validations, so that these can
    be compared. Calls are recorded, and never trained on. It samples as the entry that it is a version of.
    """

    of: LlmRef
    """The entry of `llms` that is trained."""
    draw: Literal["uniform", "latest"] = "uniform"
    """Which version an episode gets: any of the pool, or the newest."""
    size: int = Field(default=5, ge=1)
    """Versions in the pool: the newest ones, the base not counted."""
