"""Which of several addresses of one model a call goes to, which of them can be used, and when calls stop.

A conversation stays at one address, where the engine still has its tokens in the prefix cache; new ones go to
each address in turn. An address that fails is set aside and probed until it can be used again, and its
conversations go on at the others. Where all calls fail one after the other, no more of them are made.
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
"""That are remembered: those that were used longest ago may go on elsewhere."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0
"""Seconds that an address is set aside for: the first time, and at most; each time twice as long."""
_FAULTS = 3
"""Useless answers in a row by which an address counts as broken: a single one may be the request's fault."""
FIRST_TOKENS = 256
"""Of a prompt, by which prompts count as beginnings of the same conversation."""


@dataclass(slots=True, eq=False)
class Address:
    """An address: how it is, and what it has had to do."""

    url: str
    is_aside: bool = False
    """Whether it is not to be used until a probe says that it can be."""
    reason: str = ""
    """Why it was set aside last."""
    calls: int = 0
    """Under way."""
    answered: int = 0
    failed: int = 0
    until: float = 0.0
    """When it is probed next."""
    strikes: int = 0
    """How often it was set aside since it last answered."""
    faults: int = 0
    """Useless answers since the last good one."""
    last_answer: float = -math.inf


Probe: TypeAlias = Callable[[Address], Awaitable[str | None]]
"""Tells the reason why an address cannot be used, or None; it never raises."""


class Routes:
    """Chooses an address for each call, sets aside those that fail, and takes them back."""

    def __init__(self, urls: Sequence[str], model: str = "", probe: Probe | None = None) -> None:
        """`model` is its name in the log; without a `probe` no address is set aside.

        Raises ValueError without an address, or with one twice.
        """
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"expected one address or several different ones, found {list(urls)}")
        self.addresses = tuple(map(Address, urls))
        self._model, self._probe = model, probe
        self._seats: OrderedDict[str, Address] = OrderedDict()
        """The addresses of conversations, of those first that were used longest ago."""
        self._turn = 0
        self._probing: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    @contextmanager
    def call(
        self, conversation: str, avoid: Collection[str] = (), among: Collection[Address] | None = None
    ) -> Iterator[Address]:
        """An address for a call of a conversation, for as long as the call takes.

        `avoid` are the URLs that the same call has already failed at; they come last. `among` are the
        addresses that can be asked for what is called for, if not all.
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
        """The address that a call of a conversation goes to."""
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

    def end(self, conversation: str) -> None:
        """Forget a conversation."""
        self._seats.pop(conversation, None)

    def has_other(self, avoid: Collection[str]) -> bool:
        """Whether there is an address in use that is none of `avoid`."""
        return any(not address.is_aside and address.url not in avoid for address in self.addresses)

    def answered(self, address: Address) -> None:
        """Note a good answer."""
        address.answered += 1
        address.last_answer = time.monotonic()
        address.faults = address.strikes = 0
        address.is_aside = False

    def failed(self, address: Address, since: float, reason: str, *, is_gone: bool) -> None:
        """Note an attempt, begun at `since`, without a good answer; the address may be set aside for it.

        An address that has answered somebody else meanwhile is not set aside; nor is one that did answer, if
        not well, before it has done so several times in a row.
        """
        address.failed += 1
        address.faults += 1
        if address.last_answer <= since and (is_gone or address.faults >= _FAULTS):
            self.set_aside(address, reason)

    def set_aside(self, address: Address, reason: str) -> None:
        """Use an address no more until its probe finds nothing wrong; the only one goes on."""
        if self._probe is None or self._is_closed or len(self.addresses) == 1 or address.is_aside:
            return
        reason = masked(reason)
        self._strike(address, reason)
        others = sum(not other.is_aside for other in self.addresses)
        rest = f"its conversations go on at {others} other(s)" if others else "there is no other left"
        _LOG.warning("model '%s': %s is set aside: %s; %s", self._model, address.url, reason, rest)
        if address.url not in self._probing:
            probing = asyncio.create_task(self._bring_back(address, self._probe), name=f"probe {address.url}")
            self._probing[address.url] = probing

    async def close(self) -> None:
        """Probe no more."""
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
        """The best that there is: addresses in use, or else the one that is probed next."""
        fresh = [address for address in among if address.url not in avoid]
        return (
            [address for address in fresh if not address.is_aside]
            or [address for address in among if not address.is_aside]
            or [min(fresh or among, key=lambda address: address.until)]
        )


def conversation_of(request: ChatRequest) -> str:
    """The conversation of a request: its episode, or else the beginning of what is said.

    That is everything up to the first message of a user, or the first tokens of a prompt.
    """
    if request.conversation:
        return request.conversation
    if request.prompt is not None:
        return beginning(request.prompt[:FIRST_TOKENS])
    count = next((at for at, each in enumerate(request.messages) if each.get("role") == "user"), 0)
    return beginning(request.messages[: count + 1])


def beginning(of: object) -> str:
    """A name for conversations that begin alike."""
    return hashlib.blake2b(repr(of).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


_PAUSE_SECONDS = 30.0
"""After which an engine that is used on although its model is out lets one call through."""

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
    """Counts the calls that failed since the last one that was answered, by their causes."""

    def __init__(self, most: int | None) -> None:
        """`most` calls that fail for one cause, and none is answered, are too many; None allows all."""
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
        """Note a call with an answer."""
        self._last_answer = time.monotonic()
        if self._failed:
            self._failed.clear()
        self._error = None

    def has_answered(self, since: float) -> bool:
        """Whether a call was answered after that time: the model is there, if not for all."""
        return self._last_answer > since

    def failed(self, cause: str, message: str) -> ModelOut | None:
        """Note a call that failed for good; the error to raise in its place where it was one too many."""
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
