"""How many requests are under way at one address: as many as it can do with."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

UNPROVEN = 32
"""Requests that are sent to an address that has not answered one yet: where the key is wrong, no more are."""


class AdaptiveConcurrency:
    """A limit that grows by one for each round of answers, and is halved at each sign of overload.

    An address that was never overloaded has none, but for its first answer. (Additive increase and
    multiplicative decrease: Chiu and Jain, 1989.) Where nothing is answered at all the address is away rather
    than overloaded, and the limit stays.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit: float = UNPROVEN
        self.under_way = 0
        self._clock = clock
        self._has_answered = False
        self._halved = -math.inf
        self._answered_since = True
        """Whether there was an answer since the limit was halved last."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Within the block, a request is under way; whoever came first is let in first."""
        if self.under_way >= max(1, int(min(self.limit, 2**31))) or self._waiting:
            await self._turn()
        else:
            self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            self._let_in()

    def answered(self) -> None:
        """Note a good answer."""
        if not self._has_answered:
            self._has_answered = True
            self.limit = math.inf if self._halved == -math.inf else self.limit
        self._answered_since = True
        self.limit += 1.0 / self.limit
        self._let_in()

    def overloaded(self, since: float) -> None:
        """Note that a request, sent at `since`, was turned away, or had no answer in time.

        Of requests that were under way together only the first counts.
        """
        if since < self._halved or not self._answered_since:
            return
        self._answered_since = False
        self.limit = max(1.0, min(self.limit, self.under_way) / 2)
        self._halved = self._clock()

    async def _turn(self) -> None:
        """Wait for one; on return it is taken."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.under_way -= 1
                self._let_in()
            else:
                self._waiting.remove(turn)
            raise

    def _let_in(self) -> None:
        while self._waiting and self.under_way < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                self.under_way += 1
                turn.set_result(None)
