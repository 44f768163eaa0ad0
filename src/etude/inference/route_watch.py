"""Looking after a model's addresses: those that fail are set aside and probed until they can be used."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from etude.inference.routes import Address, Routes

_LOG = logging.getLogger("etude.routes")


class RouteWatch:
    """Sets addresses aside, and takes each back once its probe finds nothing wrong.

    The log says so once for each time, however often the probe fails.
    """

    def __init__(self, model: str, routes: Routes, probe: Callable[[Address], Awaitable[str | None]]) -> None:
        """`probe` tells the reason why an address cannot be used, or None; it never raises."""
        self._model = model
        self._routes = routes
        self._probe = probe
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    def failed(self, address: Address, since: float, reason: str, *, is_gone: bool) -> None:
        """Note an attempt, begun at `since`, without a good answer; set the address aside where it is due."""
        if self._routes.failed(address, since, is_gone=is_gone):
            self.set_aside(address, reason)

    def set_aside(self, address: Address, reason: str) -> None:
        """Use an address no more until its probe finds nothing wrong; the only one goes on."""
        if len(self._routes.addresses) == 1 or self._closed:
            return
        seconds = self._routes.set_aside(address, reason)
        if address.url in self._probing:
            return
        others = sum(other.state != "aside" for other in self._routes.addresses)
        rest = f"its conversations go on at {others} other(s)" if others else "there is no other left"
        _LOG.warning("model '%s': %s is set aside: %s; %s", self._model, address.url, reason, rest)
        probing = asyncio.create_task(self._bring_back(address, seconds), name=f"probe {address.url}")
        self._probing[address.url] = probing

    async def close(self) -> None:
        """Probe no more."""
        self._closed = True
        probing, self._probing = list(self._probing.values()), {}
        for task in probing:
            task.cancel()
        if probing:
            await asyncio.wait(probing)

    async def _bring_back(self, address: Address, seconds: float) -> None:
        while address.state == "aside":
            await asyncio.sleep(seconds)
            reason = await self._probe(address)
            if reason is not None:
                seconds = self._routes.set_aside(address, reason)
            elif address.state == "aside":
                self._routes.take_back(address)
        del self._probing[address.url]
        _LOG.warning("model '%s': %s can be used again", self._model, address.url)
