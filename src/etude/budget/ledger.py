"""The ledger: the one place where a run's spending is known, and where it is bounded.

A call is charged when it was made, whatever becomes of its answer: what a resumed run has from its journal
is not asked for again, and so never counted twice. Before a call begins, the most that it can take is held
for it; one for which there is no room waits until others have ended, and when none is left the run stops.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import Any

from etude.budget.bill import Bill, Line, bill_of, line_key, store_line, store_time
from etude.budget.limits import Limit, Unit, limits_of
from etude.budget.prices import prices_of
from etude.budget.purpose import Purpose
from etude.config.schema import Config
from etude.core.call import NO_USAGE, Usage
from etude.core.errors import BudgetReached
from etude.store.journal import Journal

_SECONDS_BETWEEN_TIMES = 5.0
"""The time at work is stored so often: a process that is killed forgets less than that."""

_NOTHING = Line("", "", "")


class Ledger:
    """Counts what a run takes, journals it, and stops the run at a limit of its budget."""

    def __init__(
        self,
        journal: Journal,
        config: Config,
        *,
        gpus: float = 0.0,
        episodes: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`gpus` are those that the run holds; `episodes` is how many were played before.

        Raises ConfigError for a file of prices that cannot be read.
        """
        self.limits = limits_of(config)
        self.bounds_calls = any(limit.unit in ("usd", "tokens") for limit in self.limits)
        """Whether calls have to be held room for."""
        self.prices = prices_of(config)
        self.reached: BudgetReached | None = None
        self.on_reached: Callable[[], None] = lambda: None
        """Called once, when the run has to stop."""
        self._journal = journal
        self._clock = clock
        self._gpus = gpus
        self._numbers = itertools.count()
        self._holds: dict[int, list[tuple[Limit, float]]] = {}
        self._waiting: set[asyncio.Future[None]] = set()
        bill = bill_of(journal)
        self._lines = {line.key: line for line in bill.lines}
        self._earlier = bill.seconds, bill.gpu_seconds
        self._since = self._stored_at = clock()
        for limit in self.limits:
            if limit.unit == "episodes":
                limit.used = episodes
        for line in bill.lines:
            self._use(line, _NOTHING)
        self._note_time()

    @property
    def bill(self) -> Bill:
        """All that the run has taken so far."""
        return Bill(tuple(self._lines.values()), *self._at_work())

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
            self._set(line.plus_call(usage, None if price is None else price.usd(usage, version)))
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

    @property
    def admission(self) -> Callable[[], AbstractAsyncContextManager[None]] | None:
        """Around each episode that is played; None where nothing bounds how many there are."""
        return self.episode if any(limit.unit == "episodes" for limit in self.limits) else None

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Count an episode that is played within the block, once it has ended well."""
        number = await self._hold(None, {"episodes": 1.0}, "")
        try:
            yield
            for limit in self.limits:
                limit.used += limit.unit == "episodes"
        finally:
            self.release(number)

    def tick(self) -> None:
        """Look at the clock, and store the time now and then; to be called about once a second."""
        self._note_time()
        if self._clock() - self._stored_at >= _SECONDS_BETWEEN_TIMES:
            self.store_time()
        for limit in self.limits:
            if limit.unit in ("hours", "gpu_hours") and limit.used >= limit.most:
                self._stop(limit.reached())

    def store_time(self) -> None:
        """Store how long the run has been at work."""
        self._stored_at = self._clock()
        store_time(self._journal, *self._at_work())

    def figures(self) -> dict[str, Any]:
        """The sums, and the limits, for displays."""
        whole = self.bill.total
        limits = {limit.key: [limit.used, limit.most] for limit in self.limits}
        return {"usd": whole.usd, "tokens": whole.tokens, "limits": limits}

    async def _hold(self, model: str | None, amounts: Mapping[Unit, float], what: str) -> int:
        own = [
            limit for limit in self.limits if limit.unit in amounts and (model is None or limit.covers(model))
        ]
        while own:
            full = next((each for each in own if not each.has_room(amounts[each.unit])), None)
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
        store_line(self._journal, line)

    def _use(self, line: Line, before: Line) -> None:
        for limit in self.limits:
            if limit.unit == "usd" and limit.covers(line.model):
                limit.used += line.usd - before.usd
            elif limit.unit == "tokens" and limit.covers(line.model):
                limit.used += line.tokens - before.tokens

    def _at_work(self) -> tuple[float, float]:
        """Seconds, and those of GPUs."""
        now = self._clock() - self._since
        return self._earlier[0] + now, self._earlier[1] + now * self._gpus

    def _note_time(self) -> None:
        seconds: dict[Unit, float] = dict(zip(("hours", "gpu_hours"), self._at_work(), strict=True))
        for limit in self.limits:
            if limit.unit in seconds:
                limit.used = seconds[limit.unit] / 3600
