"""A process that does its part of a job: where it loads the policy, what it locks, and when it is to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from etude.cluster.launch import HeadLost, Seat
from etude.learner.team import PeerLost, Team
from etude.models.device import choose_device, choose_dtype, dtype_name
from etude.store.run_folder import RunLock

PEER_SECONDS = 600.0
"""That a process waits for another: longer than any checkpoint takes to write."""
_LOOK_SECONDS = 0.5


def loading_of(team: Team, device: str, dtype: str) -> dict[str, str]:
    """The `device` and `dtype` by which this process loads the policy, from those that were asked for."""
    device = device if team.device is None else str(team.device)
    chosen = choose_device(device)
    if not team.shards or chosen.type == "cpu":
        return {"device": device, "dtype": dtype}
    # The whole model need not fit on the device where a part of it will be.
    return {"device": "cpu", "dtype": dtype_name(choose_dtype(dtype, chosen, 0))}


def locked_seat(seat: Seat, team: Team) -> RunLock:
    """This process's lock, for as long as it trains. All processes of a team must ask together.

    Raises PeerLost where a process of an earlier team does not end.
    """
    lock = seat.lock(leads=team.leads)
    if team.any(lock is None) or lock is None:
        raise PeerLost("a process of an earlier team still trains the job, on another node")
    return lock


@contextmanager
def asked_to_end(
    look: Callable[[threading.Event, threading.Event], None],
) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Two events: the job is not to run any more, and this process is to make way, as SIGTERM asks it to.

    `look(canceled, stopping)` is called in a thread, again and again, and may set them. Where the head is
    lost the job is not to run any more.
    """
    canceled, stopping, over = threading.Event(), threading.Event(), threading.Event()

    def watch() -> None:
        while not over.wait(_LOOK_SECONDS) and not canceled.is_set():
            try:
                look(canceled, stopping)
            except HeadLost:
                canceled.set()

    before = signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield canceled, stopping
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
