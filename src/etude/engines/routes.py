"""Routing of calls between the addresses of one model, with health probes and a circuit breaker.

A conversation stays at one address, whose prefix cache still has its tokens. New conversations go to each
address in turn. A failing address is set aside and probed until it works again, and its conversations move
to the others. When too many calls fail in a row, the breaker stops further calls.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from etude.core.call import ChatRequest
from etude.core.errors import ModelOut
from etude.core.secrets import masked

_LOG = logging.getLogger("etude.routes")

_MOST_CONVERSATIONS = 2**17
"""Conversations to remember; the least recently used ones may move to another address."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0
"""Seconds for which an address is set aside: the first time, and at most. The time doubles each time."""
_FAULTS = 3
"""Failures in a row after which a reachable address is set aside. A single one may be the request's fault."""
FIRST_TOKENS = 256
"""Prompts with this many equal tokens at the start count as one conversation."""


@dataclass(slots=True, eq=False)
class Address:
    """An address of a model, with its state and counters."""

    url: str
    is_aside: bool = False
    """Whether it is out of use until a probe succeeds."""
    reason: str = ""
    """Why it was last set aside."""
    calls: int = 0
    """Calls in flight."""
    answered: int = 0
    failed: int = 0
    until: float = 0.0
    """When it is probed next, in seconds of `time.monotonic`."""
    strikes: int = 0
    """Set-asides and failed probes since the last good answer, at most 30."""
    faults: int = 0
    """Failures since the last good answer, set-aside or failed probe."""
    last_answer: float = -math.inf


Probe: TypeAlias = Callable[[Address], Awaitable[str | None]]
"""Returns the reason why an address cannot be used, or None; it never raises."""


class Routes:
    """Chooses an address for each call, sets aside those that fail, and takes them back."""

    def __init__(self, urls: Sequence[str], model: str = "", probe: Probe | None = None) -> None:
        """`model` is the name in the log. Without a `probe`, no address is ever set aside.

        Raises ValueError if there is no address, or one of them twice.
        """
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"expected one address or several different ones, found {list(urls)}")
        self.addresses = tuple(map(Address, urls))
        self._model, self._probe = model, probe
        self._seats: OrderedDict[str, Address] = OrderedDict()
        """The address of each conversation, least recently used first."""
        self._turn = 0
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    @contextmanager
    def call(
        self, conversation: str, avoid: Collection[str] = (), among: Collection[Address] | None = None
    ) -> Iterator[Address]:
        """Choose an address for a call, and count the call as in flight within the block.

        `avoid` has the URLs where the same call already failed; they are used last. `among` limits the choice
        to some of the addresses.
        """
        address = self.choose(conversation, avoid, among)
        address.calls += 1
        try:
            yield address
        finally:
            address.calls -= 1

    def choose(
        self, conversation: str, avoid: Collection[str] = (), among: Collection[Address] | None = None
    ) -> Address:
        """Return the address for a call of a conversation."""
        if len(self.addresses) == 1:
            return self.addresses[0]
        usable = self._usable(self.addresses if among is None else among, avoid)
        seat = self._seats.get(conversation)
        if seat is None or seat not in usable:
            seat = self._seats[conversation] = usable[self._turn % len(usable)]
            self._turn += 1
            if len(self._seats) > _MOST_CONVERSATIONS:
                self._seats.popitem(last=False)
        self._seats.move_to_end(conversation)
        return seat

    def has_other(self, avoid: Collection[str]) -> bool:
        """Return whether an address outside `avoid` is in use."""
        return any(not address.is_aside and address.url not in avoid for address in self.addresses)

    def answered(self, address: Address) -> None:
        """Record a good answer."""
        address.answered += 1
        address.last_answer = time.monotonic()
        address.faults = address.strikes = 0
        address.is_aside = False

    def failed(self, address: Address, since: float, reason: str, *, is_gone: bool) -> None:
        """Record an attempt, begun at `since`, without a good answer; this may set the address aside.

        An address that answered another call meanwhile is not set aside. Unless it `is_gone`, it must also
        have failed several times in a row.
        """
        address.failed += 1
        address.faults += 1
        if address.last_answer <= since and (is_gone or address.faults >= _FAULTS):
            self.set_aside(address, reason)

    def set_aside(self, address: Address, reason: str) -> None:
        """Stop using an address until a probe succeeds. The only address stays in use."""
        if self._probe is None or self._is_closed or len(self.addresses) == 1 or address.is_aside:
            return
        reason = masked(reason)
        self._strike(address, reason)
        others = sum(not other.is_aside for other in self.addresses)
        rest = f"its conversations go on at {others} other(s)" if others else "no other is left"
        _LOG.warning("model '%s': %s is set aside: %s; %s", self._model, address.url, reason, rest)
        if address.url not in self._probing:
            probing = asyncio.create_task(self._bring_back(address, self._probe), name=f"probe {address.url}")
            self._probing[address.url] = probing

    async def close(self) -> None:
        """Stop all probes."""
        self._is_closed = True
        probing, self._probing = list(self._probing.values()), {}
        for task in probing:
            task.cancel()
        if probing:
            await asyncio.wait(probing)

    def _strike(self, address: Address, reason: str) -> None:
        seconds = min(_FIRST_WAIT * 2.0**address.strikes, _LONGEST_WAIT)
        address.strikes = min(address.strikes + 1, 30)
        address.faults = 0
        address.is_aside, address.reason, address.until = True, reason, time.monotonic() + seconds

    async def _bring_back(self, address: Address, probe: Probe) -> None:
        while address.is_aside:
            await asyncio.sleep(max(0.0, address.until - time.monotonic()))
            if (reason := await probe(address)) is not None:
                self._strike(address, reason)
            else:
                address.is_aside = False
        del self._probing[address.url]
        _LOG.warning("model '%s': %s can be used again", self._model, address.url)

    def _usable(self, among: Collection[Address], avoid: Collection[str]) -> Sequence[Address]:
        """Return addresses in use, outside `avoid` if possible; or else the one that is probed next."""
        fresh = [address for address in among if address.url not in avoid]
        return (
            [address for address in fresh if not address.is_aside]
            or [address for address in among if not address.is_aside]
            or [min(fresh or among, key=lambda address: address.until)]
        )


def conversation_key(request: ChatRequest) -> str:
    """Return the conversation of a request: its episode, or else a digest of how it begins.

    The beginning is everything up to the first user message, or the first tokens of a prompt.
    """
    if request.conversation:
        return request.conversation
    if request.prompt is not None:
        return beginning_digest(request.prompt[:FIRST_TOKENS])
    count = next((at for at, each in enumerate(request.messages) if each.get("role") == "user"), 0)
    return beginning_digest(request.messages[: count + 1])


def beginning_digest(of: object) -> str:
    """Return a digest, by which conversations that begin alike share a name."""
    return hashlib.blake2b(repr(of).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_PAUSE_SECONDS = 30.0
"""Seconds after which an open breaker lets one call through."""

_WHAT_TO_DO = {
    "http_401": "check its `api_key`, or OPENAI_API_KEY",
    "http_403": "check its `api_key`, or OPENAI_API_KEY, and what the key may do",
    "http_402": "check the account's balance",
    "http_404": "check its `model_name` and `base_url`",
    "no_model": "load the weights at its address, or check `model_name`",
    "timeout": "look at the server's load and log, or raise `request_timeout`",
    "connection": "start the server, or check `base_url`",
    "scheme": "check `base_url`",
    "too_large": "ask for fewer logprobs, or raise `max_answer_mb`",
}


class Breaker:
    """A circuit breaker: counts failed calls by cause since the last call that was answered."""

    def __init__(self, most: int | None) -> None:
        """The breaker opens after `most` failures for one cause, with no answer between; None: never."""
        self._most = most
        self._failed: Counter[str] = Counter()
        self._error: ModelOut | None = None
        self._until = 0.0
        self._last_answer = -math.inf

    def require_closed(self) -> None:
        """Raise ModelOut while no call may be made."""
        if self._error is None:
            return
        if time.monotonic() < self._until:
            raise ModelOut(str(self._error))
        self._until = time.monotonic() + _PAUSE_SECONDS

    def answered(self) -> None:
        """Record an answered call."""
        self._last_answer = time.monotonic()
        if self._failed:
            self._failed.clear()
        self._error = None

    def has_answered(self, since: float) -> bool:
        """Return whether a call was answered after `since`: the model works, if not for all calls."""
        return self._last_answer > since

    def failed(self, cause: str, message: str) -> ModelOut | None:
        """Record a call that failed for good; return the error to raise instead if it was one too many."""
        self._failed[cause] += 1
        count = self._failed[cause]
        if self._most is None or count < self._most:
            return None
        advice = _WHAT_TO_DO.get(cause, "look at the server's log")
        self._error = ModelOut(
            f"{message}. Its last {count} calls failed like this, with no answer between them, so no more "
            f"are made: {advice}, then resume the run. What was answered is kept"
        )
        self._until = time.monotonic() + _PAUSE_SECONDS
        return self._error
