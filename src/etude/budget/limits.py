"""The limits of a budget: how much of each is used, and held for what is under way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from etude.config.schema import Config
from etude.core.errors import BudgetReached

Unit: TypeAlias = Literal["usd", "tokens", "hours", "gpu_hours", "episodes"]

_WHOLE = ("tokens", "episodes")


@dataclass(slots=True)
class Limit:
    """The most of one unit, for the run or for one of its models."""

    key: str
    """Where it stands in the config."""
    unit: Unit
    most: float
    model: str | None = None
    """None for the run as a whole."""
    used: float = 0.0
    held: float = 0.0
    """For what is under way, at most."""
    holders: int = 0
    """How many of these there are."""

    def covers(self, model: str) -> bool:
        """Whether what the model takes counts."""
        return self.model in (None, model)

    def has_room(self, amount: float) -> bool:
        """Whether so much more can be taken on."""
        return self.used + self.held + amount <= self.most

    def hold(self, amount: float) -> None:
        """Keep so much for something that begins."""
        self.held += amount
        self.holders += 1

    def release(self, amount: float) -> None:
        """Let go of what was held: it has ended."""
        self.holders -= 1
        self.held = self.held - amount if self.holders else 0.0

    def reached(self, amount: float = 0.0, what: str = "") -> BudgetReached:
        """The error that says so; `what` is what would take up to `amount` more."""
        more = f", and {what} may take up to {shown(amount, self.unit)}" if what else ""
        text = f"{self.key} is {shown(self.most, self.unit)}: {shown(self.used, self.unit)} are used{more}"
        larger = max(2 * self.most, 1.1 * (self.used + amount))
        override = f"{round(larger)}" if self.unit in _WHOLE else f"{larger:.4g}"
        return BudgetReached(text, override=f"{self.key}={override}")


def limits_of(config: Config) -> list[Limit]:
    """All limits that a config sets."""
    return [*_limits("budget", config.budget, None)] + [
        limit
        for name, llm in config.llms.items()
        for limit in _limits(f"llms.{name}.budget", llm.budget, name)
    ]


def _limits(key: str, budget: object, model: str | None) -> Iterator[Limit]:
    units: tuple[Unit, ...] = ("usd", "tokens", "hours", "gpu_hours", "episodes")
    for unit in units:
        most = getattr(budget, unit, None)
        if most is not None:
            yield Limit(f"{key}.{unit}", unit, float(most), model)


def shown(amount: float, unit: Unit) -> str:
    """An amount as a person reads it."""
    if unit == "usd":
        return shown_usd(amount)
    if unit in _WHOLE:
        return f"{amount:,.0f} {unit}"
    return f"{amount:.3g} {'GPU hours' if unit == 'gpu_hours' else 'hours'}"


def shown_usd(usd: float) -> str:
    """An amount of money, with more places than those of cents where it is less than a dollar."""
    if usd >= 1 or not usd:
        return f"${usd:,.2f}"
    places = 4 if usd >= 0.001 else 8
    whole, _, cents = f"{usd:.{places}f}".rstrip("0").partition(".")
    return f"${whole}.{cents:0<2}"
