"""The ledger: the one place that counts a run's spending and limits it; and the bill, read from its journal.

A call is charged when it is made, even if its answer is lost. A resumed run reads answers from its journal,
so it pays for nothing twice. The ledger reserves the most that a call can cost before it begins. A call that
does not fit waits until others have ended. If no others are left, the run stops.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias
from urllib.parse import quote, urlsplit

from etude.config.component import LlmConfig, ModelPrices, RunBudget
from etude.core.call import NO_USAGE, Usage
from etude.core.errors import BudgetReached, RequestError
from etude.core.interfaces import Progress
from etude.core.threads import end_tasks
from etude.engines.local import LocalLlmConfig, OpponentsConfig
from etude.engines.meter import Purpose
from etude.engines.openai_compatible import OpenAiLlmConfig
from etude.store.journal import Journal
from etude.store.run_folder import TIME_STEP, RunFolder

_CALLS = "spent/calls/"
_JOBS = "spent/jobs/"


@dataclass(frozen=True, slots=True)
class BillEntry:
    """The total usage of one model in one role and part of a run, or of a training job."""

    model: str
    """The entry of `llms`."""
    role: str
    """`agent`, `user`, `judge`, `teacher`, `opponent`, `other`; `training` for a job."""
    phase: str
    """`train/3`, `validation/5`, `eval`; for a job its name."""
    calls: int = 0
    """Calls that the model answered or charged for."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were in the endpoint's cache."""
    completion_tokens: int = 0
    trained_tokens: int = 0
    usd: float = 0.0
    unpriced_tokens: int = 0
    """Tokens of all kinds without a known price."""

    @property
    def tokens(self) -> int:
        """Tokens of all kinds."""
        return self.prompt_tokens + self.completion_tokens + self.trained_tokens

    @property
    def key(self) -> str:
        """Its key in the journal."""
        return _line_key(self.model, self.role, self.phase)

    def plus_call(self, usage: Usage, usd: float | None) -> Self:
        """Return the line with one more call."""
        unpriced = usage.prompt_tokens + usage.completion_tokens if usd is None else 0
        return replace(
            self,
            calls=self.calls + 1,
            prompt_tokens=self.prompt_tokens + usage.prompt_tokens,
            cached_tokens=self.cached_tokens + usage.cached_tokens,
            completion_tokens=self.completion_tokens + usage.completion_tokens,
            usd=self.usd + (usd or 0.0),
            unpriced_tokens=self.unpriced_tokens + unpriced,
        )

    def as_json(self) -> dict[str, Any]:
        """Return all fields, and `tokens`."""
        return {**asdict(self), "tokens": self.tokens}


@lru_cache(maxsize=256)
def _line_key(model: str, role: str, phase: str) -> str:
    if role == "training":
        return f"{_JOBS}{quote(phase, safe='')}"
    return _CALLS + "/".join(quote(part, safe="") for part in (model, role, phase))


_AMOUNTS = tuple(each.name for each in fields(BillEntry) if each.name not in ("model", "role", "phase"))


def total(lines: Iterable[BillEntry], *, model: str = "", role: str = "", phase: str = "") -> BillEntry:
    """Return the sum of lines, under the given names."""
    lines = list(lines)
    return BillEntry(
        model, role, phase, **{name: sum(getattr(line, name) for line in lines) for name in _AMOUNTS}
    )


@dataclass(frozen=True, slots=True)
class Bill:
    """The total usage of a run so far."""

    lines: tuple[BillEntry, ...] = ()
    seconds: float = 0.0
    """Seconds during which the run's processes were working."""

    @property
    def total(self) -> BillEntry:
        """The sum of all lines."""
        return total(self.lines)

    def by(self, *names: str) -> list[BillEntry]:
        """Return sums of lines grouped by `names` (`model`, `role`, `phase`), sorted by them."""
        groups: dict[tuple[str, ...], list[BillEntry]] = {}
        for line in self.lines:
            groups.setdefault(tuple(getattr(line, name) for name in names), []).append(line)
        return [total(lines, **dict(zip(names, key, strict=True))) for key, lines in sorted(groups.items())]

    def as_json(self) -> dict[str, Any]:
        """Return the lines and their sums."""
        amounts = self.total.as_json()
        return {
            "total": {name: amounts[name] for name in (*_AMOUNTS, "tokens")},
            "lines": [line.as_json() for line in self.lines],
            "hours": self.seconds / 3600,
        }


def load_bill(journal: Journal) -> Bill:
    """Read a run's bill from its journal. Raises StoreError."""
    lines = tuple(BillEntry(**value) for prefix in (_CALLS, _JOBS) for _, value in journal.scan(prefix))
    return Bill(lines, (journal.get(TIME_STEP) or {}).get("seconds", 0.0))


def read_bill(run: Path) -> Bill:
    """Read the bill of the run in a folder. Raises StoreError."""
    with RunFolder.read(run) as folder:
        return load_bill(folder.journal)


Unit: TypeAlias = Literal["usd", "tokens", "hours"]


@dataclass(slots=True)
class Limit:
    """The run's limit in one unit."""

    unit: Unit
    most: float
    used: float = 0.0
    held: float = 0.0
    """The reserved amount: an upper bound for all calls and jobs under way."""
    holders: int = 0
    """The number of reservations."""

    @property
    def key(self) -> str:
        """Its key in the config."""
        return f"budget.{self.unit}"

    def as_error(self, amount: float = 0.0, what: str = "") -> BudgetReached:
        """Return the error for a reached limit; `what` would take up to `amount` more."""
        more = f", and {what} may take up to {self._show(amount)}" if what else ""
        text = f"{self.key} is {self._show(self.most)}: {self._show(self.used)} are used{more}"
        larger = max(2 * self.most, 1.1 * (self.used + amount))
        override = f"{round(larger)}" if self.unit == "tokens" else f"{larger:.4g}"
        return BudgetReached(text, override=f"{self.key}={override}")

    def _show(self, amount: float) -> str:
        if self.unit == "usd":
            return format_usd(amount)
        return f"{amount:,.0f} tokens" if self.unit == "tokens" else f"{amount:.3g} hours"


Llms: TypeAlias = Mapping[str, LlmConfig]
"""The entries of `llms`."""


def find_prices(llms: Llms) -> dict[str, ModelPrices]:
    """Return the prices of models by name, without models that have none."""
    prices = {name: llm.prices for name, llm in llms.items() if llm.prices is not None}
    opponents = {name: llm.of for name, llm in llms.items() if isinstance(llm, OpponentsConfig)}
    return {name: prices[of] for name, of in opponents.items() if of in prices} | prices


def unpriced_models(llms: Llms) -> list[str]:
    """Return the models without a price that run, as far as is known, on another machine."""
    priced = find_prices(llms)
    return [name for name, llm in llms.items() if name not in priced and _is_remote(llm, llms)]


def _is_remote(llm: LlmConfig, llms: Llms) -> bool:
    if isinstance(llm, OpponentsConfig):
        return _is_remote(llms[llm.of], llms)
    if isinstance(llm, OpenAiLlmConfig):
        return urlsplit(llm.address).hostname not in ("localhost", "127.0.0.1", "::1")
    return not isinstance(llm, LocalLlmConfig)


def how_to_price(name: str) -> str:
    """Return the config key that gives a model its price."""
    return f"llms.{name}.prices: {{prompt: 0.15, completion: 0.60}}, in USD for a million tokens"


def require_bounded(llms: Llms, budget: RunBudget | None) -> None:
    """Raise RequestError for limits that could not be enforced.

    A limit in USD needs the price of all models. Limits in USD or tokens also need the maximum
    length of an answer.
    """
    if budget is None or not (budget.usd or budget.tokens):
        return
    unpriced = unpriced_models(llms)
    for name, llm in llms.items():
        if budget.usd and name in unpriced:
            raise RequestError(
                f"budget.usd is set, but what llms.{name} costs is not known: give its price, as in "
                f"{how_to_price(name)} (0 where it is your own)"
            )
        if isinstance(llm, OpenAiLlmConfig) and llm.max_tokens is None:
            unit = "usd" if budget.usd else "tokens"
            raise RequestError(
                f"budget.{unit} is set, but an answer of llms.{name} may have any length: set "
                f"llms.{name}.max_tokens"
            )


def format_usd(usd: float) -> str:
    """Format an amount of money, with more than two decimals if it is less than a dollar."""
    if usd >= 1 or not usd:
        return f"${usd:,.2f}"
    places = 4 if usd >= 0.001 else 8
    whole, _, cents = f"{usd:.{places}f}".rstrip("0").partition(".")
    return f"${whole}.{cents:0<2}"


_SECONDS_BETWEEN_TIMES = 5.0
"""Seconds between two writes of the working time: a killed process loses no more than that."""

_LOOK_SECONDS = 1.0
_LAST_WORDS_SECONDS = 0.5
"""Seconds for answers that have just arrived to get into the journal."""

_NOTHING = BillEntry("", "", "")


class Ledger:
    """Counts a run's spending, journals it, and stops the run at a limit of its budget."""

    def __init__(
        self,
        journal: Journal,
        llms: Llms,
        budget: RunBudget | None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start from the run's earlier spending. Raises RequestError for limits that cannot be enforced."""
        require_bounded(llms, budget)
        units: tuple[Unit, ...] = ("usd", "tokens", "hours")
        self.limits = [
            Limit(unit, float(most)) for unit in units if (most := getattr(budget, unit, None)) is not None
        ]
        self.reserves_calls = any(limit.unit in ("usd", "tokens") for limit in self.limits)
        """Whether calls need a reservation."""
        self.prices = find_prices(llms)
        self.reached: BudgetReached | None = None
        self.on_reached: Callable[[], None] = lambda: None
        """Called once, when the run has to stop."""
        self._journal = journal
        self._clock = clock
        self._numbers = itertools.count()
        self._holds: dict[int, list[tuple[Limit, float]]] = {}
        self._left = asyncio.Event()
        """Set, and replaced by a new event, whenever a reservation is released."""
        bill = load_bill(journal)
        self._lines = {line.key: line for line in bill.lines}
        self._earlier = bill.seconds
        self._since = self._stored_at = clock()
        for line in bill.lines:
            self._use(line, _NOTHING)
        self._note_time()

    @property
    def bill(self) -> Bill:
        """The total spending so far."""
        return Bill(tuple(self._lines.values()), self._at_work())

    async def hold(self, model: str, most: Usage) -> int:
        """Reserve room for a call with `most` tokens at most. Returns the number for `settle`.

        Waits while there is no room and others may still release some; forever once the run has to stop.
        """
        tokens = most.prompt_tokens + most.completion_tokens
        price = self.prices.get(model)
        amounts: dict[Unit, float] = {"tokens": tokens, "usd": price.call_price(most) if price else 0.0}
        return await self._hold(amounts, "the next call")

    async def settle(self, number: int | None, model: str, purpose: Purpose, usage: Usage) -> None:
        """Count an answered call, and release its reservation.

        It contains no await, so what the caller stores afterwards comes later in the journal.
        """
        if usage != NO_USAGE:
            price = self.prices.get(model)
            known = self._lines.get(_line_key(model, purpose.role, purpose.phase))
            line = known or BillEntry(model, purpose.role, purpose.phase)
            self._set(line.plus_call(usage, None if price is None else price.call_price(usage)))
        self.release(number)

    def release(self, number: int | None) -> None:
        """Release the reservation of a call or job that has ended."""
        for limit, amount in self._holds.pop(number, ()) if number is not None else ():
            limit.holders -= 1
            limit.held = limit.held - amount if limit.holders else 0.0
        self._wake()

    async def begin_job(self, model: str, name: str, tokens: int) -> None:
        """Count a training job as if it had used `tokens`, before it is submitted; once per name.

        Waits like `hold` while there is no room.
        """
        line = self._job(model, name, tokens)
        if (known := self._lines.get(line.key)) is not None and known.trained_tokens:
            return
        amounts: dict[Unit, float] = {"tokens": tokens, "usd": line.usd}
        number = await self._hold(amounts, f"the job {name}")
        self._set(line)
        self.release(number)

    def end_job(self, model: str, name: str, tokens: int) -> None:
        """Count the tokens that a job has used."""
        line = self._job(model, name, tokens)
        before = self._lines.get(line.key)
        if before != line and (tokens or before is not None):
            self._set(line)
            self._wake()

    def tick(self) -> None:
        """Check the time limits and store the working time now and then. Call it about once a second."""
        self._note_time()
        if self._clock() - self._stored_at >= _SECONDS_BETWEEN_TIMES:
            self.store_time()
        for limit in self.limits:
            if limit.unit == "hours" and limit.used >= limit.most:
                self._stop(limit.as_error())

    def store_time(self) -> None:
        """Store the run's working time."""
        self._stored_at = self._clock()
        self._journal.put_soon(TIME_STEP, {"seconds": self._at_work()})

    def figures(self) -> dict[str, Any]:
        """Return the sums and the limits, for displays."""
        whole = self.bill.total
        limits = {limit.key: [limit.used, limit.most] for limit in self.limits}
        return {"usd": whole.usd, "tokens": whole.tokens, "limits": limits}

    async def _hold(self, amounts: Mapping[Unit, float], what: str) -> int:
        affected = [limit for limit in self.limits if limit.unit in amounts]
        while affected:
            over = (each for each in affected if each.used + each.held + amounts[each.unit] > each.most)
            full = next(over, None)
            if full is None and self.reached is None:
                break
            if full is not None and not full.holders:
                self._stop(full.as_error(amounts[full.unit], what))
            await self._left.wait()
        number = next(self._numbers)
        self._holds[number] = [(limit, amounts[limit.unit]) for limit in affected]
        for limit, amount in self._holds[number]:
            limit.held += amount
            limit.holders += 1
        return number

    def _stop(self, reached: BudgetReached) -> None:
        if self.reached is None:
            self.reached = reached
            self.on_reached()

    def _wake(self) -> None:
        if self.reached is None:
            self._left.set()
            self._left = asyncio.Event()

    def _job(self, model: str, name: str, tokens: int) -> BillEntry:
        price = self.prices.get(model)
        usd = None if price is None or price.training is None else tokens * price.training / 1e6
        unpriced = tokens if usd is None else 0
        return BillEntry(
            model, "training", name, trained_tokens=tokens, usd=usd or 0.0, unpriced_tokens=unpriced
        )

    def _set(self, line: BillEntry) -> None:
        before = self._lines.get(line.key, _NOTHING)
        self._lines[line.key] = line
        self._use(line, before)
        # After each call: `asdict` would copy each value, and take ten times as long.
        self._journal.put_soon(line.key, {name: getattr(line, name) for name in BillEntry.__slots__})

    def _use(self, line: BillEntry, before: BillEntry) -> None:
        for limit in self.limits:
            if limit.unit == "usd":
                limit.used += line.usd - before.usd
            elif limit.unit == "tokens":
                limit.used += line.tokens - before.tokens

    def _at_work(self) -> float:
        return self._earlier + self._clock() - self._since

    def _note_time(self) -> None:
        for limit in self.limits:
            if limit.unit == "hours":
                limit.used = self._at_work() / 3600


@asynccontextmanager
async def within_budget(ledger: Ledger, progress: Progress) -> AsyncIterator[None]:
    """Raise BudgetReached from the block when the run has to stop. The time in the block counts.

    All work in the block is then cancelled, as by Ctrl-C. Use it as the innermost block, so that all
    resources of the work are closed after it.
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
        await end_tasks(looking)
        with contextlib.suppress(Exception):  # The journal itself may have failed.
            if ledger.bill.lines:
                ledger.store_time()


async def _look(ledger: Ledger, progress: Progress) -> None:
    while True:
        progress.spent(ledger.figures())
        await asyncio.sleep(_LOOK_SECONDS)
        ledger.tick()
