"""Which of several addresses of one model a call goes to.

A conversation stays at one address, where the engine still has its tokens in the prefix cache. A new one
goes to the address that rendezvous hashing prefers (Thaler and Ravishankar, 1998), so that a lost address
moves its own conversations and no others, unless that address already has more than its share (consistent
hashing with bounded loads: Mirrokni, Thorup and Zadimoghaddam, 2018).
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from etude.core.call import ChatRequest
from etude.store.addresses import AddressRow, Rows

State: TypeAlias = Literal["up", "trial", "aside", "draining"]

_MOST_CONVERSATIONS = 1.25
"""Times its even share that an address may have of the conversations."""
_MOST_CALLS, _FREE_CALLS = 1.5, 4
"""Times its even share, and so many more, that an address may have of the calls under way. With few calls
evenness is worth less than a prefix that is already read."""
_IDLE_SECONDS = 900.0
"""A conversation without a call for so long no longer counts, and may go on elsewhere."""
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 60.0
"""Seconds that an address is set aside for: the first time, and at most; each time twice as long."""
_LONGEST_DRAIN = 300.0
_FAULTS = 3
"""Useless answers in a row by which an address counts as broken: a single one may be the request's fault."""
FIRST_TOKENS = 256
"""Of a prompt, by which prompts count as beginnings of the same conversation."""


@dataclass(slots=True, eq=False)
class Address:
    """An address: how it is, and what it has had to do."""

    url: str
    state: State = "up"
    """`aside`: not to be used until a probe says that it can be; `trial`: one call at a time, until one is
    answered; `draining`: no new conversations."""
    reason: str = ""
    """Why it is not `up`."""
    conversations: int = 0
    calls: int = 0
    """Under way."""
    answered: int = 0
    failed: int = 0
    until: float = 0.0
    """When it is probed next, or drained long enough."""
    strikes: int = 0
    """How often it was set aside since it last answered."""
    faults: int = 0
    """Useless answers since the last good one."""
    last_answer: float = -math.inf
    lacks_model: bool = False
    """Whether it is known not to have the weights that are asked for."""
    is_out: bool = False
    """Whether an operator has taken it out: it keeps its conversations, and gets no new ones."""

    @property
    def takes_newcomers(self) -> bool:
        """Whether a conversation may begin there."""
        return self.state != "draining" and not self.is_out

    @property
    def row(self) -> AddressRow:
        """How it is."""
        state, reason = str(self.state), self.reason
        if self.is_out and state in ("up", "draining"):
            state = "draining" if self.conversations or self.calls else "drained"
            reason = "taken out by command"
        return AddressRow(state, reason, self.conversations, self.calls, self.answered, self.failed)

    @property
    def is_open(self) -> bool:
        """Whether a call may go there."""
        return self.state in ("up", "draining") or (self.state == "trial" and not self.calls)

    @property
    def is_easy(self) -> bool:
        """Whether it is up with so few calls that no call leaves it for another."""
        return self.state == "up" and self.calls <= _FREE_CALLS


@dataclass(slots=True)
class _Seat:
    """A conversation's place at an address."""

    address: Address
    calls: int = 0
    used: float = 0.0
    is_over: bool = False
    """Whether no call follows those under way."""


@runtime_checkable
class HasAddresses(Protocol):
    """An engine that samples at addresses."""

    def address_rows(self) -> dict[str, AddressRow]:
        """How each of several addresses is, in all processes that ask it; nothing for a single one."""

    def note_rows(self, process: object, rows: Rows) -> None:
        """Note how the addresses are in another process; nothing for one that has ended."""

    @property
    def taken_out(self) -> frozenset[str]:
        """The addresses that an operator has taken out."""

    def take_out(self, urls: Collection[str]) -> None:
        """Begin no conversations at these, beside those that this process knows of itself."""


class Routes:
    """Chooses an address for each call, and keeps account of how the addresses are."""

    def __init__(self, urls: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """Raises ValueError without an address, or with one twice."""
        if not urls or len(set(urls)) != len(urls):
            raise ValueError(f"expected one address or several different ones, found {list(urls)}")
        self.addresses = tuple(map(Address, urls))
        self._clock = clock
        self._seats: OrderedDict[str, _Seat] = OrderedDict()
        """The conversations, the one that was used longest ago first."""

    @contextmanager
    def call(
        self, conversation: str, avoid: Collection[str] = (), among: Collection[Address] | None = None
    ) -> Iterator[Address]:
        """An address for a call of a conversation, for as long as the call takes.

        `avoid` are the URLs that the same call has already failed at; they come last. `among` are the
        addresses that can be asked for what is called for, if not all.
        """
        address = self.choose(conversation, avoid, among)
        seat = self._seats.get(conversation) or _Seat(address)
        seat.calls += 1
        address.calls += 1
        try:
            yield address
        finally:
            address.calls -= 1
            seat.calls -= 1
            seat.used = self._clock()
            if seat.is_over:
                self.end(conversation)

    def choose(
        self, conversation: str, avoid: Collection[str] = (), among: Collection[Address] | None = None
    ) -> Address:
        """The address that a call of a conversation goes to."""
        if len(self.addresses) == 1:
            return self.addresses[0]
        now = self._clock()
        self._forget(now)
        seat = self._seats.get(conversation)
        if seat is not None and among is None and not avoid and seat.address.is_easy:
            # As below, without a look at all the others: there may be a thousand.
            seat.used = now
            self._seats.move_to_end(conversation)
            return seat.address
        usable = self._usable(self.addresses if among is None else among, avoid, now)
        if seat is None or seat.address not in usable:
            address = self._new_home(conversation, usable)
            if seat is None:
                seat = self._seats[conversation] = _Seat(address)
            else:
                seat.address.conversations -= 1
                seat.address = address
            address.conversations += 1
        seat.used = now
        self._seats.move_to_end(conversation)
        return self._with_room(conversation, seat.address, usable)

    def has_other(self, avoid: Collection[str]) -> bool:
        """Whether there is an open address that is none of `avoid`."""
        return any(address.is_open and address.url not in avoid for address in self.addresses)

    def answered(self, address: Address) -> None:
        """Note a good answer."""
        address.answered += 1
        address.last_answer = self._clock()
        address.faults = 0
        address.strikes = 0
        if address.state in ("trial", "aside"):
            address.state, address.reason = "up", ""

    def failed(self, address: Address, since: float, *, is_gone: bool) -> bool:
        """Note an attempt, begun at `since`, without a good answer; whether the address should be set aside.

        An address that has answered somebody else meanwhile is not; nor is one that did answer, if not well,
        before it has done so several times in a row. The only address never is.
        """
        address.failed += 1
        address.faults += 1
        if len(self.addresses) == 1 or address.last_answer > since or address.state == "aside":
            return False
        return is_gone or address.state == "trial" or address.faults >= _FAULTS

    def set_aside(self, address: Address, reason: str) -> float:
        """Use an address no more; gives the seconds until it should be probed."""
        seconds = min(_FIRST_WAIT * 2.0**address.strikes, _LONGEST_WAIT)
        address.strikes = min(address.strikes + 1, 30)
        address.faults = 0
        address.state, address.reason, address.until = "aside", reason, self._clock() + seconds
        return seconds

    def take_back(self, address: Address) -> None:
        """Try an address again that was set aside."""
        address.state = "trial"

    def drain(self, address: Address, seconds: float, reason: str) -> None:
        """Begin no conversations at an address for some time."""
        if address.state != "aside" and len(self.addresses) > 1:
            address.state, address.reason = "draining", reason
            address.until = self._clock() + min(seconds, _LONGEST_DRAIN)

    def take_out(self, urls: Collection[str]) -> None:
        """Begin no conversations at these addresses until they are not among those of a later call."""
        for address in self.addresses:
            address.is_out = address.url in urls and len(self.addresses) > 1

    def end(self, conversation: str) -> None:
        """Forget a conversation once the calls of it that are under way have ended."""
        seat = self._seats.get(conversation)
        if seat is None:
            return
        seat.is_over = True
        if not seat.calls:
            del self._seats[conversation]
            seat.address.conversations -= 1

    def _usable(self, among: Collection[Address], avoid: Collection[str], now: float) -> list[Address]:
        """The best that there is: open addresses, or else the one that will be open first."""
        for address in self.addresses:
            if address.state == "draining" and now >= address.until:
                address.state, address.reason = "up", ""
        fresh = [address for address in among if address.url not in avoid]
        return (
            [address for address in fresh if address.is_open]
            or [address for address in among if address.is_open]
            or [min(fresh or among, key=lambda address: (address.lacks_model, address.until))]
        )

    def _new_home(self, conversation: str, usable: Sequence[Address]) -> Address:
        usable = [address for address in usable if address.takes_newcomers] or usable
        total = sum(address.conversations for address in usable)
        most = math.ceil(_MOST_CONVERSATIONS * (total + 1) / len(usable))
        return next(each for each in ranked(conversation, usable) if each.conversations < most)

    def _with_room(self, conversation: str, home: Address, usable: Sequence[Address]) -> Address:
        """The home, or, for this call only, another address where it has far too much to do."""
        total = sum(address.calls for address in usable)
        most = math.ceil(_MOST_CALLS * (total + 1) / len(usable)) + _FREE_CALLS
        if len(usable) == 1 or home.calls < most:
            return home
        usable = [address for address in usable if address.takes_newcomers] or usable
        return next((each for each in ranked(conversation, usable) if each.calls < most), home)

    def _forget(self, now: float) -> None:
        while self._seats:
            conversation, seat = next(iter(self._seats.items()))
            if seat.used + _IDLE_SECONDS > now:
                return
            if seat.calls:
                seat.used = now
                self._seats.move_to_end(conversation)
            else:
                del self._seats[conversation]
                seat.address.conversations -= 1


def ranked(conversation: str, addresses: Sequence[Address]) -> list[Address]:
    """The addresses, the one that a conversation would rather be at first: rendezvous hashing."""

    def weight(address: Address) -> bytes:
        return hashlib.blake2b(f"{address.url}\0{conversation}".encode(), digest_size=8).digest()

    return sorted(addresses, key=weight)


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
