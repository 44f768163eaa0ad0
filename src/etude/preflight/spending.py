"""The tokens and the money that a run would take, by what episodes of it have taken so far."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from etude.budget.bill import Bill, Line, bill_of
from etude.budget.ledger import how_to_price, prices_of, require_bounded, unpriced
from etude.config.schema import Config
from etude.core.call import Usage
from etude.core.episode import EpisodeRecord
from etude.core.stats import t95
from etude.preflight.finding import Findings
from etude.store.episodes import read_episode, stored_episodes
from etude.store.run_folder import RunFolder

_LOOKED_AT = 64
"""Episodes of a run that are looked at, for how far they are apart."""


@dataclass(frozen=True, slots=True)
class Range:
    """A figure with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """Whether the interval tells anything."""
        return math.isfinite(self.high)


@dataclass(frozen=True, slots=True)
class PerEpisode:
    """All that an episode takes on average: its calls, and those of judges and others about it."""

    episodes: int = 1
    """Those that this was measured on."""
    is_assumed: bool = False
    """Whether it was measured on none."""
    lines: tuple[Line, ...] = ()
    """By model, the sums of these episodes."""
    spread: float = math.nan
    """The standard deviation of the episodes' tokens by their mean; NaN where it is not known."""
    assumptions: tuple[str, ...] = field(default=())

    def _of_one(self, name: str) -> float:
        return float(sum(getattr(line, name) for line in self.lines)) / self.episodes

    @property
    def calls(self) -> float:
        """Calls of all models."""
        return self._of_one("calls")

    @property
    def prompt_tokens(self) -> float:
        """Those of all calls."""
        return self._of_one("prompt_tokens")

    @property
    def completion_tokens(self) -> float:
        """Those of all calls."""
        return self._of_one("completion_tokens")

    @property
    def tokens(self) -> float:
        """Those of prompts and those that are sampled."""
        return self.prompt_tokens + self.completion_tokens

    def tokens_of(self, model: str | None) -> float:
        """Those of one model."""
        own = [line for line in self.lines if line.model == model]
        return sum(line.prompt_tokens + line.completion_tokens for line in own) / self.episodes

    def usd(self, config: Config) -> dict[str, float]:
        """The money for one episode, by model, of those that have a price."""
        prices = prices_of(config)
        costs: dict[str, float] = {}
        for line in self.lines:
            usage = Usage(line.prompt_tokens, line.completion_tokens, line.cached_tokens)
            if line.usd:  # As it was charged: trained versions may cost more.
                costs[line.model] = line.usd / self.episodes
            elif line.model in prices:
                costs[line.model] = prices[line.model].of_call(usage, 0) / self.episodes
        return costs

    def of(self, each: float, episodes: int) -> Range:
        """The sum over so many further episodes of what one takes, `each`."""
        total, freedom = each * episodes, min(self.episodes, _LOOKED_AT) - 1
        if freedom < 1 or math.isnan(self.spread):
            return Range(total, 0.0, math.inf)
        part = t95(freedom) * self.spread * math.sqrt(1 / (freedom + 1) + 1 / max(episodes, 1))
        return Range(total, total * max(0.0, 1 - part), total * (1 + part))


def measured(run: RunFolder) -> PerEpisode | None:
    """All that the episodes of a run took so far; None where none has ended."""
    keys = [key for key, _ in stored_episodes(run.journal)]
    lines = Bill(tuple(each for each in bill_of(run.journal).lines if each.role != "training")).by("model")
    if not keys or not lines:
        return None
    chosen = sorted({keys[number * len(keys) // _LOOKED_AT] for number in range(_LOOKED_AT)})
    records = (read_episode(run.journal, key) for key in chosen)
    spread = _spread([_tokens(record) for record in records if record is not None])
    return PerEpisode(len(keys), lines=tuple(lines), spread=spread)


def check_spending(config: Config, findings: Findings) -> None:
    """Whether the limits of the budget can be kept, and what each model costs, or that it is not known."""
    with findings.of_errors("budget"):
        require_bounded(config)
        for name, price in prices_of(config).items():
            each = f"${price.prompt:g} for a million prompt tokens, ${price.completion:g} sampled"
            findings.ok(f"price of {name}", each)
        for name in unpriced(config):
            remedy = f"to give its price: {how_to_price(name)}"
            findings.warn(f"price of {name}", f"not known, and tokens alone are counted; {remedy}")


def over_budget(config: Config, usd: Range | None, tokens: Range) -> list[str]:
    """Warnings of limits of the run's budget that it would reach before its end."""
    needed = {"usd": usd and usd.mean, "tokens": tokens.mean}
    return [
        f"budget.{unit} is {most:,g}, and the whole run would take about {need:,.4g}: it would stop before "
        "its end, and could go on with more"
        for unit, need in needed.items()
        if (most := getattr(config.budget, unit, None)) is not None and need is not None and need > most
    ]


def _tokens(record: EpisodeRecord) -> float:
    used = [call.completion.usage for call in record.calls if call.completion is not None]
    return float(sum(usage.prompt_tokens + usage.completion_tokens for usage in used))


def _spread(values: Sequence[float]) -> float:
    mean = math.fsum(values) / max(len(values), 1)
    if len(values) < 2 or not mean or min(values) == max(values):
        return math.nan  # Values that are all equal tell nothing about how far others spread.
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) / mean
