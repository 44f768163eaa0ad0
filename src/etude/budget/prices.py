"""The prices of models: by the config, by a file of the user's, or by the list in this folder."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from etude.budget.gpus import require_counted
from etude.config.component import LlmConfig, ModelPrices, TokenPrices
from etude.config.document import read_document
from etude.config.problems import Problems
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


PriceList: TypeAlias = Mapping[str, ProviderPrices]
"""By provider."""


@functools.cache
def read_prices(path: Path = _LIST) -> PriceList:
    """The list of prices in a file. Raises ConfigError with a line for each thing that is wrong."""
    document = read_document(path)
    problems = Problems(document)
    providers: dict[str, ProviderPrices] = {}
    for name, data in document.data.items():
        problems.add_truths(ProviderPrices, data, (name,))
        try:
            providers[str(name)] = ProviderPrices.model_validate(data)
        except ValidationError as error:
            problems.add_validation(error, ProviderPrices, data, (name,))
    problems.raise_if_any()
    return providers


def listed_at(url: str, model: str, lists: tuple[PriceList, ...] = ()) -> ListedPrices | None:
    """The entry of a model at an address, in the first of the lists that has it, Etude's own the last."""
    host = urlsplit(url).hostname or ""
    for prices in (*lists, read_prices()):
        for provider in prices.values():
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
    """The prices of the models of a config that have any, by their names. Raises ConfigError."""
    lists = () if config.prices is None else (read_prices(config.prices),)
    prices = {name: _price(name, config, lists) for name in config.llms}
    return {name: price for name, price in prices.items() if price is not None}


def _price(name: str, config: Config, lists: tuple[PriceList, ...]) -> Price | None:
    llm = config.llms[name]
    if (own := llm.prices) is not None:
        source = f"llms.{name}.prices"
        return Price(base=own, trained=own.fine_tuned or own, training=own.training, source=source)
    if isinstance(llm, OpponentsConfig):
        return _price(llm.of, config, lists)
    if not isinstance(llm, OpenAiLlmConfig):
        return None
    entries = [listed_at(address, llm.model_name, lists) for address in llm.addresses]
    entry = entries[0]
    if entry is None or any(other != entry for other in entries):
        return None
    is_tuned = llm.model_name.startswith("ft:")
    trained = entry.prices.fine_tuned
    base: TokenPrices | None = trained if is_tuned else entry.prices
    if base is None:
        return None
    source = f"the list of prices, {entry.date}" if entry.date else "the file of prices"
    return Price(
        base=base,
        trained=trained,
        training=entry.prices.training,
        source=source,
    )


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
    answer can get; one in GPU hours needs GPUs that are counted.
    """
    require_counted(config)
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
