"""The prices of models: by the config, or by the list in this folder."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from etude.config.component import LlmConfig, ModelPrices, TokenPrices
from etude.config.document import read_document
from etude.config.schema import Config
from etude.core.call import Usage
from etude.core.errors import RequestError
from etude.inference.local import LocalLlmConfig
from etude.inference.openai_config import OpenAiLlmConfig
from etude.inference.opponents_config import OpponentsConfig

_LIST = Path(__file__).with_name("prices.yml")


class ListedPrices(BaseModel, extra="forbid", frozen=True):
    """An entry of a list of prices."""

    prices: ModelPrices
    date: str = ""
    """When they were read."""
    source: str = ""


class ProviderPrices(BaseModel, extra="forbid", frozen=True):
    """The prices of a provider's models."""

    hosts: list[str]
    page: str = ""
    models: dict[str, ListedPrices] = Field(default_factory=dict)

    def of(self, model: str) -> ListedPrices | None:
        """The entry of a model, or of the base that it was fine-tuned from."""
        base = model.split(":")[1] if model.startswith("ft:") and model.count(":") > 1 else model
        known = [name for name in self.models if re.fullmatch(rf"{re.escape(name)}(-\d{{4}}.*)?", base)]
        return self.models[max(known, key=len)] if known else None


@functools.cache
def read_prices() -> Mapping[str, ProviderPrices]:
    """The list of prices, by provider."""
    data = read_document(_LIST).data
    return {str(name): ProviderPrices.model_validate(each) for name, each in data.items()}


def listed_at(url: str, model: str) -> ListedPrices | None:
    """The entry of a model at an address."""
    host = urlsplit(url).hostname or ""
    for provider in read_prices().values():
        if host in provider.hosts and (entry := provider.of(model)) is not None:
            return entry
    return None


class Price(BaseModel, frozen=True):
    """The prices of an entry of `llms`."""

    base: TokenPrices
    trained: TokenPrices | None
    """Of versions that training made; None where they are not known."""
    training: float | None
    """Of a million trained tokens."""
    source: str
    """`llms.judge.prices`, or the list that has them with its date."""

    def usd(self, usage: Usage, version: int) -> float | None:
        """The price of a call of a version; None where that is not known."""
        prices = self.trained if version else self.base
        if prices is None:
            return None
        return prices.usd(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)

    def most_usd(self, usage: Usage) -> float:
        """The highest price of a call, of whatever version, with nothing in a cache."""
        known = [prices for prices in (self.base, self.trained) if prices is not None]
        return max(each.usd(usage.prompt_tokens, 0, usage.completion_tokens) for each in known)


def prices_of(config: Config) -> dict[str, Price]:
    """The prices of the models of a config that have any, by their names."""
    prices = {name: _price(name, config) for name in config.llms}
    return {name: price for name, price in prices.items() if price is not None}


def _price(name: str, config: Config) -> Price | None:
    llm = config.llms[name]
    if (own := llm.prices) is not None:
        source = f"llms.{name}.prices"
        return Price(base=own, trained=own.fine_tuned or own, training=own.training, source=source)
    if isinstance(llm, OpponentsConfig):
        return _price(llm.of, config)
    if not isinstance(llm, OpenAiLlmConfig):
        return None
    entries = [listed_at(address, llm.model_name) for address in llm.addresses]
    entry = entries[0]
    if entry is None or any(other != entry for other in entries):
        return None
    is_tuned = llm.model_name.startswith("ft:")
    trained = entry.prices.fine_tuned
    base: TokenPrices | None = trained if is_tuned else entry.prices
    if base is None:
        return None
    source = f"the list of prices, {entry.date}"
    return Price(base=base, trained=trained, training=entry.prices.training, source=source)


_OWN_MACHINE = ("localhost", "127.0.0.1", "::1")


def unpriced(config: Config) -> list[str]:
    """The models that are not on this machine, as far as is known, and have no price."""
    priced = prices_of(config)
    return [name for name, llm in config.llms.items() if name not in priced and _is_remote(llm, config)]


def _is_remote(llm: LlmConfig, config: Config) -> bool:
    if isinstance(llm, OpponentsConfig):
        return _is_remote(config.llms[llm.of], config)
    if isinstance(llm, OpenAiLlmConfig):
        return any(urlsplit(address).hostname not in _OWN_MACHINE for address in llm.addresses)
    return not isinstance(llm, LocalLlmConfig)


def how_to_price(name: str) -> str:
    """The key that gives a model its price."""
    return f"llms.{name}.prices: {{prompt: 0.15, completion: 0.60}}, in USD for a million tokens"


def require_bounded(config: Config) -> None:
    """Raise RequestError for limits that could not be kept.

    One in USD needs the price of all models that it covers; it and one in tokens need to know how long an
    answer can get.
    """
    for name, llm in config.llms.items():
        limits = {"budget": config.budget, f"llms.{name}.budget": llm.budget}
        usd = [f"{key}.usd" for key, each in limits.items() if each is not None and each.usd is not None]
        tokens = [f"{key}.tokens" for key, each in limits.items() if each is not None and each.tokens]
        if usd and name in unpriced(config):
            raise RequestError(
                f"{usd[0]} is set, and what llms.{name} costs is not known: give its price, as in "
                f"{how_to_price(name)} (0 where it is your own)"
            )
        if (usd or tokens) and isinstance(llm, OpenAiLlmConfig) and llm.max_tokens is None:
            raise RequestError(
                f"{[*usd, *tokens][0]} is set, and an answer of llms.{name} may have any length: set "
                f"llms.{name}.max_tokens"
            )
