"""What training at OpenAI costs, as far as it can be known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

USD_PER_MILLION_TOKENS = {
    "gpt-4.1-nano": 1.5,
    "gpt-4.1-mini": 5.0,
    "gpt-4.1": 25.0,
    "gpt-4o-mini": 3.0,
    "gpt-4o": 25.0,
    "gpt-3.5-turbo": 8.0,
    "davinci-002": 6.0,
    "babbage-002": 0.4,
}
"""Prices of trained tokens as OpenAI listed them in 2025, without the models that it prices by the hour."""

AUTO_EPOCHS = 3
"""What `auto` is taken to be: OpenAI's own choice for data sets of a few hundred rows."""

_CHARACTERS_PER_TOKEN = 4
_FRAME_TOKENS = 4
"""Tokens around each message."""


def price_of(model: str) -> float | None:
    """USD for a million trained tokens of a base model, or of one that was fine-tuned from it."""
    base = model.split(":")[1] if model.startswith("ft:") and model.count(":") > 1 else model
    known = [name for name in USD_PER_MILLION_TOKENS if base == name or base.startswith(f"{name}-")]
    return USD_PER_MILLION_TOKENS[max(known, key=len)] if known else None


def trained_tokens(texts: Sequence[str], n_epochs: int | Literal["auto"]) -> int:
    """Roughly the tokens that a job on these messages is billed for: four characters are a token."""
    epochs = AUTO_EPOCHS if n_epochs == "auto" else n_epochs
    each = (len(text) / _CHARACTERS_PER_TOKEN + _FRAME_TOKENS for text in texts)
    return round(epochs * sum(each))


def usd_for(tokens: float, usd_per_million: float | None, model: str) -> float | None:
    """The price of so many trained tokens; None where the model's price is not known."""
    price = price_of(model) if usd_per_million is None else usd_per_million
    return None if price is None else tokens * price / 1e6
