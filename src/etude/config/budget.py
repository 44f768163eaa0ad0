"""The most that a run may take, and the prices of its models: the keys `budget` and `prices`."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import BaseModel, Field

Usd: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amount: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(gt=0)]


class TokenPrices(BaseModel, extra="forbid", frozen=True):
    """Prices of tokens, in USD for a million."""

    prompt: Usd
    """Of the tokens of prompts."""
    completion: Usd
    """Of sampled tokens, those of thinking included."""
    cached: Usd | None = None
    """Of tokens of prompts that the endpoint says it had in its cache; left out: as of others."""

    def usd(self, prompt: float, cached: float, completion: float) -> float:
        """The price of so many tokens. `prompt` includes what was `cached`."""
        of_cached = self.prompt if self.cached is None else self.cached
        return ((prompt - cached) * self.prompt + cached * of_cached + completion * self.completion) / 1e6


class ModelPrices(TokenPrices):
    """Prices of a model, in USD for a million tokens."""

    training: Usd | None = None
    """Of trained tokens, those of each epoch of a job counted; left out: not known."""
    fine_tuned: TokenPrices | None = None
    """Of calls of versions that training made; left out: as of the base model."""


class ModelBudget(BaseModel, extra="forbid", frozen=True):
    """The most that one model may take in a run, whoever asks it, its training included."""

    usd: Amount | None = None
    """US dollars."""
    tokens: Count | None = None
    """Tokens of prompts and sampled ones, and those that a backend says it trained on."""


class RunBudget(ModelBudget):
    """The most that a run may take. At a limit it stops, with all it has; with a larger one it goes on."""

    hours: Amount | None = None
    """Hours that the run is at work, those of its earlier processes included."""
