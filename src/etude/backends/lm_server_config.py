"""The config of training at a language-model server: `_type: lm_server`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from etude.backends.openai_config import JobsConfig
from etude.config.changeable import CHANGEABLE


class LmServerAdapterConfig(JobsConfig, name="lm_server"):
    """Train at a language-model server: `etude serve`, on this machine or another."""

    hyperparameters: dict[str, float | int | str | bool] = Field(
        default_factory=dict,
        description="More hyperparameters of jobs, as the server names them; they go before the keys above.",
    )
    free_engine: bool = Field(
        default=False,
        description="Have the server put its engine away while a job trains, where both do not fit on the "
        "device; it is brought back afterwards.",
    )
    ready_timeout: Annotated[float, CHANGEABLE] = Field(
        default=300.0, ge=0, description="Seconds to wait for the server, and for its engine to come back."
    )
