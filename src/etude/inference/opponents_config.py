"""The config of a seat that earlier versions of a trained model play: `_type: opponents`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from etude.config.component import LlmConfig
from etude.config.references import LlmRef, Refers


class OpponentsConfig(LlmConfig, name="opponents"):
    """Earlier versions of a model that is trained: one of a pool is drawn for each episode.

    The version that training began with is always in the pool, and plays in validations, so that these can
    be compared. Calls are recorded, and never trained on. It samples as the entry that it is a version of.
    """

    of: LlmRef
    """The entry of `llms` that is trained."""
    draw: Literal["uniform", "latest", "rating"] = "uniform"
    """Which version an episode gets: any of the pool, the newest, or each the more often the more surely it
    would beat the newest by the ratings."""
    size: int = Field(default=5, ge=1)
    """Versions in the pool: the newest ones, the base not counted."""
    every: int = Field(default=1, ge=1)
    """Only every n-th version goes into the pool, and the newest."""
    result: Annotated[str, Refers("evaluators")] | None = None
    """The evaluator whose score is the trained model's result in the game; left out: the reward."""
    win: float = 1.0
    """The score of a game that was won."""
    loss: float = 0.0
    """The score of a game that was lost; a draw lies in the middle."""

    @model_validator(mode="after")
    def _win_is_more(self) -> OpponentsConfig:
        if self.win <= self.loss:
            raise ValueError(f"`win` ({self.win:g}) must be more than `loss` ({self.loss:g})")
        return self

    def points(self, score: float | None) -> float | None:
        """The points of a game, from 0 to 1; None for a score outside of `loss` to `win`, and without one."""
        if score is None or not self.loss <= score <= self.win:
            return None
        return (score - self.loss) / (self.win - self.loss)
