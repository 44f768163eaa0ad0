"""The ledger: the one place where a run's spending is known, and where it is bounded.

A call is charged when it was made, whatever becomes of its answer: what a resumed run has from its journal
is not asked for again, and so never counted twice. Before a call begins, the most that it can take is held
for it; one for which there is no room waits until others have ended, and when none is left the run stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from etude.budget.bill import Bill, Line, bill_of, line_key
from etude.budget.meter import Purpose
from etude.config.component import LlmConfig, ModelPrices
from etude.config.schema import Config
from etude.core.call import NO_USAGE, Usage
from etude.core.errors import BudgetReached, RequestError
from etude.core.interfaces import Progress
from etude.inference.local import LocalLlmConfig, OpponentsConfig
from etude.inference.openai_config import OpenAiLlmConfig
from etude.store.journal import Journal
from etude.store.run_folder import TIME_STEP, RunFolder

Unit: TypeAlias = Literal["usd", "tokens", "hours"]


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
        override = f"{round(larger)}" if self.unit == "tokens" else f"{larger:.4g}"
        return BudgetReached(text, override=f"{self.key}={override}")


def limits_of(config: Config) -> list[Limit]:
    """All limits that a config sets."""
    blocks: list[tuple[str, object, str | None]] = [("budget", config.budget, None)]
    blocks += [(f"llms.{name}.budget", llm.budget, name) for name, llm in config.llms.items()]
    units: tuple[Unit, ...] = ("usd", "tokens", "hours")
    return [
        Limit(f"{key}.{unit}", unit, float(most), model)
        for key, budget, model in blocks
        for unit in units
        if (most := getattr(budget, unit, None)) is not None
    ]


def prices_of(config: Config) -> dict[str, ModelPrices]:
    """The prices of the models of a config that have any, by their names."""
    prices: dict[str, ModelPrices] = {}
    for name, llm in config.llms.items():
        of = config.llms[llm.of] if isinstance(llm, OpponentsConfig) and llm.prices is None else llm
        if of.prices is not None:
            prices[name] = of.prices
    return prices


def unpriced(config: Config) -> list[str]:
    """The models that are not on this machine, as far as is known, and have no price."""
    priced = prices_of(config)
    return [name for name, llm in config.llms.items() if name not in priced and _is_remote(llm, config)]


def _is_remote(llm: LlmConfig, config: Config) -> bool:
    if isinstance(llm, OpponentsConfig):
        return _is_remote(config.llms[llm.of], config)
    if isinstance(llm, OpenAiLlmConfig):
        own = ("localhost", "127.0.0.1", "::1")
        return any(urlsplit(address).hostname not in own for address in llm.addresses)
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


def shown(amount: float, unit: Unit) -> str:
    """An amount as a person reads it."""
    if unit == "usd":
        return shown_usd(amount)
    if unit == "tokens":
        return f"{amount:,.0f} tokens"
    return f"{amount:.3g} hours"


def shown_usd(usd: float) -> str:
    """An amount of money, with more places than those of cents where it is less than a dollar."""
    if usd >= 1 or not usd:
        return f"${usd:,.2f}"
    places = 4 if usd >= 0.001 else 8
    whole, _, cents = f"{usd:.{places}f}".rstrip("0").partition(".")
    return f"${whole}.{cents:0<2}"


_SECONDS_BETWEEN_TIMES = 5.0
"""The time at work is stored so often: a process that is killed forgets less than that."""

_LOOK_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.5
"""For answers that have just come to get into the journal."""

_NOTHING = Line("", "", "")


class Ledger:
    """Counts what a run takes, journals it, and stops the run at a limit of its budget."""

    def __init__(
        self, journal: Journal, config: Config, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits_of(config)
        self.bounds_calls = any(limit.unit in ("usd", "tokens") for limit in self.limits)
        """Whether calls have to be held room for."""
        self.prices = prices_of(config)
        self.reached: BudgetReached | None = None
        self.on_reached: Callable[[], None] = lambda: None
        """Called once, when the run has to stop."""
        self._journal = journal
        self._clock = clock
        self._numbers = itertools.count()
        self._holds: dict[int, list[tuple[Limit, float]]] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        bill = bill_of(journal)
        self._lines = {line.key: line for line in bill.lines}
        self._earlier = bill.seconds
        self._since = self._stored_at = clock()
        for line in bill.lines:
            self._use(line, _NOTHING)
        self._note_time()

    @property
    def bill(self) -> Bill:
        """All that the run has taken so far."""
        return Bill(tuple(self._lines.values()), self._at_work())

    async def hold(self, model: str, most: Usage) -> int:
        """Hold room for a call that takes so many tokens at most; the number to `settle` it by.

        Waits while there is no room and others may yet leave some; for good once the run has to stop.
        """
        tokens = most.prompt_tokens + most.completion_tokens
        price = self.prices.get(model)
        amounts: dict[Unit, float] = {"tokens": tokens, "usd": price.most_usd(most) if price else 0.0}
        return await self._hold(model, amounts, "the next call")

    async def settle(
        self, number: int | None, model: str, purpose: Purpose, usage: Usage, version: int = 0
    ) -> None:
        """Count a call of a version of a model that was answered, and let go of what was held for it.

        It is done when this is first waited for: what whoever called stores then comes later in the journal.
        """
        if usage != NO_USAGE:
            price = self.prices.get(model)
            known = self._lines.get(line_key(model, purpose.role, purpose.phase))
            line = known or Line(model, purpose.role, purpose.phase)
            self._set(line.plus_call(usage, None if price is None else price.of_call(usage, version)))
        self.release(number)

    def release(self, number: int | None) -> None:
        """Let go of what was held for something that has ended."""
        for limit, amount in self._holds.pop(number, ()) if number is not None else ():
            limit.release(amount)
        self._wake()

    async def begin_job(self, model: str, name: str, tokens: int) -> None:
        """Count a training job as if it had taken so many tokens, before it is submitted; once per name.

        Waits as `hold` does where there is no room for it.
        """
        line = self._job(model, name, tokens)
        if (known := self._lines.get(line.key)) is not None and known.trained_tokens:
            return
        amounts: dict[Unit, float] = {"tokens": tokens, "usd": line.usd}
        number = await self._hold(model, amounts, f"the job {name}")
        self._set(line)
        self.release(number)

    def end_job(self, model: str, name: str, tokens: int) -> None:
        """Count what a job has taken, at the price that it had when it began."""
        line = self._job(model, name, tokens)
        before = self._lines.get(line.key)
        if before is not None and before.trained_tokens:
            share = tokens / before.trained_tokens
            line = replace(
                line, usd=before.usd * share, unpriced_tokens=round(before.unpriced_tokens * share)
            )
        if before != line and (tokens or before is not None):
            self._set(line)
            self._wake()

    def tick(self) -> None:
        """Look at the clock, and store the time now and then; to be called about once a second."""
        self._note_time()
        if self._clock() - self._stored_at >= _SECONDS_BETWEEN_TIMES:
            self.store_time()
        for limit in self.limits:
            if limit.unit == "hours" and limit.used >= limit.most:
                self._stop(limit.reached())

    def store_time(self) -> None:
        """Store how long the run has been at work."""
        self._stored_at = self._clock()
        seconds = self._at_work()
        self._journal.put_soon(TIME_STEP, lambda: {"seconds": seconds})

    def figures(self) -> dict[str, Any]:
        """The sums, and the limits, for displays."""
        whole = self.bill.total
        limits = {limit.key: [limit.used, limit.most] for limit in self.limits}
        return {"usd": whole.usd, "tokens": whole.tokens, "limits": limits}

    async def _hold(self, model: str, amounts: Mapping[Unit, float], what: str) -> int:
        own = [limit for limit in self.limits if limit.unit in amounts and limit.covers(model)]
        while own:
            over = (each for each in own if each.used + each.held + amounts[each.unit] > each.most)
            full = next(over, None)
            if full is None and self.reached is None:
                break
            if full is not None and not full.holders:
                self._stop(full.reached(amounts[full.unit], what))
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.add(waiting)
            try:
                await waiting
            finally:
                self._waiting.discard(waiting)
        number = next(self._numbers)
        self._holds[number] = [(limit, amounts[limit.unit]) for limit in own]
        for limit, amount in self._holds[number]:
            limit.hold(amount)
        return number

    def _stop(self, reached: BudgetReached) -> None:
        if self.reached is None:
            self.reached = reached
            self.on_reached()

    def _wake(self) -> None:
        for waiting in self._waiting if self.reached is None else ():
            if not waiting.done():
                waiting.set_result(None)

    def _job(self, model: str, name: str, tokens: int) -> Line:
        price = self.prices.get(model)
        usd = None if price is None or price.training is None else tokens * price.training / 1e6
        unpriced = tokens if usd is None else 0
        return Line(model, "training", name, trained_tokens=tokens, usd=usd or 0.0, unpriced_tokens=unpriced)

    def _set(self, line: Line) -> None:
        before = self._lines.get(line.key, _NOTHING)
        self._lines[line.key] = line
        self._use(line, before)
        self._journal.put_soon(line.key, line.stored)

    def _use(self, line: Line, before: Line) -> None:
        for limit in self.limits:
            if limit.unit == "usd" and limit.covers(line.model):
                limit.used += line.usd - before.usd
            elif limit.unit == "tokens" and limit.covers(line.model):
                limit.used += line.tokens - before.tokens

    def _at_work(self) -> float:
        return self._earlier + self._clock() - self._since

    def _note_time(self) -> None:
        for limit in self.limits:
            if limit.unit == "hours":
                limit.used = self._at_work() / 3600


def open_ledger(config: Config, run: RunFolder) -> Ledger:
    """The ledger of a run, with what it has taken before.

    Raises RequestError for a budget that could not be kept.
    """
    require_bounded(config)
    return Ledger(run.journal, config)


@asynccontextmanager
async def within_budget(ledger: Ledger, progress: Progress) -> AsyncIterator[None]:
    """End the block with BudgetReached when the run has to stop; the time within it counts.

    Whatever is under way in the block then is cancelled, as by Ctrl-C. It is the innermost block: all that
    the work needs is closed after it.
    """
    looking = asyncio.ensure_future(_look(ledger, progress))
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as scope:
            ledger.on_reached = lambda: scope.reschedule(loop.time() + _LAST_WORDS_SECONDS)
            ledger.tick()
            yield
    except BaseException as error:
        if ledger.reached is not None and scope.expired():
            raise ledger.reached from error
        raise
    finally:
        ledger.on_reached = lambda: None
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
        with contextlib.suppress(Exception):  # The journal may be what failed.
            if ledger.bill.lines:
                ledger.store_time()


async def _look(ledger: Ledger, progress: Progress) -> None:
    while True:
        progress.spent(ledger.figures())
        await asyncio.sleep(_LOOK_SECONDS)
        ledger.tick()
