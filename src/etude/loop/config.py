"""The config of the loop over epochs: `_type: epochs`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from etude.config.changeable import CHANGEABLE
from etude.config.finetuning import TrainerConfig


class EpochTrainerConfig(TrainerConfig, name="epochs"):
    """The loop over epochs."""

    patience: int | None = Field(
        default=None,
        ge=1,
        description="Stop after this many rewards that did not beat the best: of validations where there "
        "are any, else of epochs.",
    )
    target_reward: float | None = Field(
        default=None, description="Stop when this reward is reached: in validation where there is any."
    )
    keep_checkpoints: Annotated[Annotated[int, Field(ge=1)] | Literal["all"], CHANGEABLE] = Field(
        default=3,
        description="How many versions to keep, or `all`: those with the best validation or, without "
        "validations, whose training episodes had the best reward. The last one is always kept too.",
    )
    job_timeout: Annotated[float, CHANGEABLE] = Field(
        default=86400.0, gt=0, description="Seconds that a training job may take before it counts as stuck."
    )
    poll_interval: Annotated[float, CHANGEABLE] = Field(
        default=5.0,
        gt=0,
        description="Seconds between two looks at a job that runs elsewhere; the first ones come sooner.",
    )
