"""The places of runners, and which of them an episode gets: the one with the fewest, or one for itself.

Whoever waits is woken in turn, when there is a place and not before: an episode costs the same however many
runners there are, and however many others wait.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import chain
from typing import TypeAlias

from etude.runners.head import RemoteRunner
from etude.runners.process import RunnerProcess


@dataclass(slots=True, eq=False)
class Place:
    """Where one runner at a time runs."""

    number: int
    """From 1; also the name of its log."""
    runner: RemoteRunner | None = None
    process: RunnerProcess | None = None
    """Of the runner that is there, or is being started."""
    since: float | None = None
    """When that began to start, or stood ready, by the monotonic clock."""
    episodes: int = 0
    is_exclusive: bool = False
    """Whether one episode has it alone."""
    is_closed: bool = False
    """Whether there is no room for its runner any more, as after the loss of a machine."""
    starting: asyncio.Task[None] | None = None
    """Starts its runner; nobody is given the place meanwhile."""

    @property
    def state(self) -> str:
        """`ready`, `starting`, `closed` where there is no room any more, `idle` before the first episode."""
        if self.runner is not None and self.runner.is_alive:
            return "ready"
        return "starting" if self.starting is not None else "closed" if self.is_closed else "idle"


_Waiting: TypeAlias = "deque[asyncio.Future[Place]]"


class Places:
    """Places for a bounded number of episodes each."""

    def __init__(self, count: int, episodes_each: int) -> None:
        self._all = tuple(Place(number) for number in range(1, count + 1))
        self._by_load: list[dict[Place, None]] = [{} for _ in range(episodes_each + 1)]
        """The open places that nobody has alone, by the number of their episodes."""
        self._by_load[0] = dict.fromkeys(self._all)
        self._exclusive = 0
        self._waiting: _Waiting = deque()
        self._waiting_alone: _Waiting = deque()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Place]:
        return iter(self._all)

    @asynccontextmanager
    async def take(self, *, alone: bool) -> AsyncIterator[Place]:
        """A place with room for an episode, or with none in it but this one.

        Raises whatever ends the start of a runner while this waits.
        """
        waiter: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        (self._waiting_alone if alone else self._waiting).append(waiter)
        self._share_out()
        try:
            place = await waiter
        except asyncio.CancelledError:
            if not waiter.cancelled() and waiter.exception() is None:
                self._leave(waiter.result())  # It was given just then.
            self._share_out()  # What was kept free for this one.
            raise
        try:
            yield place
        finally:
            self._leave(place)

    def close(self, place: Place) -> None:
        """Give nobody this place any more."""
        place.is_closed = True
        self._by_load[place.episodes].pop(place, None)

    def hold(self, place: Place, starting: asyncio.Task[None]) -> None:
        """Give nobody this place while its runner starts; where that fails, whoever waits gets the error."""
        place.starting = starting
        self._by_load[place.episodes].pop(place, None)
        starting.add_done_callback(lambda task: self._offer(place, task))

    def _offer(self, place: Place, started: asyncio.Task[None]) -> None:
        place.starting = None
        if not started.cancelled() and (error := started.exception()) is not None:
            for waiter in (*self._waiting, *self._waiting_alone):
                if not waiter.done():
                    waiter.set_exception(error)
        if not place.is_exclusive:
            self._list(place)
        self._share_out()

    def _list(self, place: Place) -> None:
        if not place.is_closed and place.starting is None:
            self._by_load[place.episodes][place] = None

    def _share_out(self) -> None:
        """Give whoever waits longest a place, as long as there is one."""
        while _first(self._waiting_alone) and self._by_load[0]:
            self._give(self._waiting_alone.popleft(), next(iter(self._by_load[0])), alone=True)
        while _first(self._waiting) and (place := self._roomiest()) is not None:
            self._give(self._waiting.popleft(), place, alone=False)

    def _roomiest(self) -> Place | None:
        """The place with the fewest episodes, if it has room for one more."""
        places = chain.from_iterable(self._by_load[:-1])
        if self._waiting_alone and not self._exclusive:
            next(places, None)  # The emptiest one is kept free for whoever wants one alone.
        return next(places, None)

    def _give(self, waiter: asyncio.Future[Place], place: Place, *, alone: bool) -> None:
        del self._by_load[place.episodes][place]
        place.episodes += 1
        place.is_exclusive = alone
        if alone:
            self._exclusive += 1
        else:
            self._list(place)
        waiter.set_result(place)

    def _leave(self, place: Place) -> None:
        if place.is_exclusive:
            place.is_exclusive = False
            self._exclusive -= 1
        else:
            self._by_load[place.episodes].pop(place, None)
        place.episodes -= 1
        self._list(place)
        self._share_out()


def _first(waiting: _Waiting) -> bool:
    """Whether somebody waits; those who do no longer are let go of."""
    while waiting and waiting[0].done():
        waiting.popleft()
    return bool(waiting)
