"""A thousand runners in one process and no time: the real pool, head, link and journal on virtual machines.

What the head does costs it what was measured (`scale_ceilings.py`), one thing after another; so do the
journal's writer and the head's network. Everything else of a node is waiting.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import scale_clock
from scale_ceilings import frame_bytes, measure_beats, measure_head
from scale_clock import Station, VirtualLoop, Wire
from scale_head import Playing, playing
from scale_runner import OTHER_STEPS, Work, run

from etude.core.keys import generator
from etude.runners.frames import Stream
from etude.runners.process import ProcessEnd
from etude.runners.program import Invitation
from etude.store.database import Operation, Put, Waiter, Writer, _Item, _settle
from etude.store.journal import Journal

_SMALL = 2
"""Tokens of a call in the simulation's own memory and files; its costs are those of the real size."""
_DETECTION_SECONDS = 5.0
"""After which a runner on a node that is gone is given up, as of Ray's."""
_AWAY_SECONDS = 60.0
EDGE = 0.2
"""Of the calls, at the beginning and at the end, that are not counted: runners start, episodes run out."""


@dataclass(frozen=True)
class Costs:
    """Seconds that things take."""

    call: float
    """Of the head, for each call that a runner commits: of its loop and of the journal's thread, which are of
    one interpreter and wait for each other."""
    episode: float
    """For each episode, besides."""
    beat: float
    """For each look at a runner."""
    step: float
    """Of the journal's thread alone, for each step."""
    start: float = 2.0
    """From the wish for a runner to its call."""
    latency: float = 0.0005
    """Of the network, one way."""
    bits: float = 10e9
    """That the head's network carries in a second, each way."""


@dataclass(frozen=True)
class Setting:
    """A run to simulate."""

    nodes: int
    """With one runner each."""
    each: int
    """Episodes at a time of a runner."""
    work: Work
    rounds: float = 1.0
    """Times as many episodes as are played at a time."""
    lost_per_minute: float = 0.0
    """The share of the nodes that is lost in each minute."""
    until: float | None = None
    """When to stop, in virtual seconds, where all episodes would take too long to simulate."""

    @property
    def at_once(self) -> int:
        """Episodes at a time."""
        return self.nodes * self.each


@dataclass
class Outcome:
    """The figures of a simulated run."""

    setting: Setting
    seconds: float = 0.0
    """Of the virtual clock."""
    calls_per_s: float = 0.0
    """Committed, while all nodes were at work."""
    head: float = 0.0
    """The share of that time in which the head's loop was busy."""
    journal: float = 0.0
    network: float = 0.0
    waits: tuple[float, float] = (0.0, 0.0)
    """Seconds from a call's answer to its receipt: the median, and what one in a hundred exceeds."""
    played_again: int | None = None
    """Episodes that were begun again because their node was lost; None where not all were played out."""
    calls_again: int | None = None
    """Calls that were committed more than once, which none should be; None likewise."""
    beats: int = 0
    real_seconds: float = 0.0
    """CPU time of the simulation."""
    peak_mb: float = 0.0


@dataclass
class Cluster:
    """The virtual machines: the head's parts, and what was seen of them."""

    loop: VirtualLoop
    costs: Costs
    tokens: int
    cpu: Station = field(default_factory=Station)
    disk: Station = field(default_factory=Station)
    inward: Station = field(default_factory=Station)
    outward: Station = field(default_factory=Station)
    committed: list[tuple[float, ...]] = field(default_factory=list)
    """For each call its time, and how long the head's loop, its writer and its network had been busy then."""
    waits: list[float] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("beats", "plays", "calls"), 0))
    nodes: dict[int, VirtualProcess] = field(default_factory=dict)

    def to_head(self, data: bytes, receive: Callable[[bytes], None]) -> None:
        """Carry what a runner writes: over the network, and through what the head has to do before it."""
        is_call = b'"put"' in data[:40] and b"/call/" in data[:200]
        size = frame_bytes(self.tokens) if is_call else len(data)
        seconds = self.costs.call if is_call else 0.0

        def arrive() -> None:
            now = self.loop.time()
            done = self.cpu.done_at(self.inward.done_at(now, 8 * size / self.costs.bits), seconds)
            self.loop.call_at(done, take)

        def take() -> None:
            if is_call:
                self.counts["calls"] += 1
            receive(data)

        self.loop.call_later(self.costs.latency, arrive)

    def from_head(self) -> scale_clock.Carry:
        """Carry what the head writes to one runner."""
        last = 0.0

        def send(data: bytes, receive: Callable[[bytes], None]) -> None:
            nonlocal last
            sent = self.outward.done_at(self.loop.time(), 8 * len(data) / self.costs.bits)
            # The loop keeps no order among what is due at the same time.
            last = max(sent + self.costs.latency, last + 1e-7)
            self.loop.call_at(last, receive, data)

        def carry(data: bytes, receive: Callable[[bytes], None]) -> None:
            kind, now = data[4:40], self.loop.time()
            done = now  # An answer: what it costs was paid when it was asked for.
            if b'"play"' in kind:
                done, self.counts["plays"] = (
                    self.cpu.done_at(now, self.costs.episode),
                    self.counts["plays"] + 1,
                )
            elif b'"ping"' in kind:
                done, self.counts["beats"] = self.cpu.done_at(now, self.costs.beat), self.counts["beats"] + 1
            if done > now:
                self.loop.call_at(done, send, data, receive)
            else:
                send(data, receive)

        return carry

    def note_commit(self, seconds: float) -> None:
        """A runner has the receipt of a call, so long after it had its answer."""
        now = self.loop.time()
        self.waits.append(seconds)
        busy = (station.busy_until(now) for station in (self.cpu, self.disk, self.inward))
        self.committed.append((now, *busy))


class VirtualWriter(Writer):
    """The writer of a journal, whose thread belongs to the virtual machine."""

    def __init__(self, path: Path, cluster: Cluster) -> None:
        super().__init__(path)
        self._cluster = cluster
        self._is_busy = False

    def _run(self) -> None:
        """The thread has nothing to do."""

    def submit(self, operation: Operation, *waiters: Waiter) -> None:
        super().submit(operation, *waiters)
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        batch = self._take()
        error = self._tried([operation for operation, _ in batch], [])
        seconds = self._cluster.costs.step * sum(isinstance(operation, Put) for operation, _ in batch)
        done = self._cluster.disk.done_at(self._cluster.loop.time(), seconds)
        self._is_busy = True
        self._cluster.loop.call_at(done, self._end, batch, error)

    def _end(self, batch: list[_Item], error: Any) -> None:
        self._settled += len(batch)
        self.committed += len(batch)
        self._is_busy = False
        _settle([waiter for _, waiters in batch for waiter in waiters], error)
        if self.waiting:
            self._begin()


class VirtualProcess:
    """A runner on a node of its own."""

    log = "nothing"

    def __init__(self, cluster: Cluster, place: int) -> None:
        self.node = f"node{place}"
        self._cluster = cluster
        self._end: asyncio.Future[ProcessEnd] = cluster.loop.create_future()
        self._wire: Wire | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, invitation: Invitation, seconds: float, work: Work) -> None:
        """Call the head after so many seconds, and be a runner."""
        self._running = asyncio.ensure_future(self._run(invitation, seconds, work))

    async def _run(self, invitation: Invitation, seconds: float, work: Work) -> None:
        await asyncio.sleep(seconds)
        cluster = self._cluster
        reader, writer, self._wire = await scale_clock.connect(
            cluster.loop, invitation.address, cluster.to_head, cluster.from_head()
        )
        stream = Stream(reader, writer)
        await run(stream, invitation.number, bytes.fromhex(invitation.key), work, cluster.note_commit)
        self._finish(ProcessEnd("ended with exit code 0"))

    def lose(self) -> None:
        """Lose the node: silence, and after some seconds somebody sees it."""
        if self._running is not None and self._wire is not None and not self._end.done():
            self._running.cancel()
            self._wire.is_closed = True
            self._cluster.loop.call_later(_DETECTION_SECONDS, self._be_missed)

    def _be_missed(self) -> None:
        self._finish(ProcessEnd("was lost with its node", is_lost=True))
        assert self._wire is not None
        self._wire.peer.abort()

    def _finish(self, end: ProcessEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)

    async def ended(self) -> ProcessEnd:
        """Wait for its end."""
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        """End it."""
        if self._running is not None:
            self._running.cancel()
        self._finish(ProcessEnd("was killed by SIGKILL", by_others=True))

    def bound_log(self) -> None:
        """It has no log."""

    def memory(self) -> float:
        """Not simulated."""
        return 0.0

    def last_words(self) -> str:
        """Nothing."""
        return ""


class VirtualLauncher:
    """Starts runners on virtual nodes."""

    address = ""

    def __init__(self, cluster: Cluster, work: Work) -> None:
        self._cluster = cluster
        self._work = work
        self.away: dict[int, float] = {}
        """When a place's node is back that was lost."""

    async def launch(self, invitation: Invitation, place: int) -> VirtualProcess:
        """Start one, when its node is there."""
        costs, now = self._cluster.costs, self._cluster.loop.time()
        spread = generator(0, "start", invitation.number).random()
        wait = max(0.0, self.away.get(place, 0.0) - now) + costs.start * (0.5 + spread)
        process = self._cluster.nodes[place] = VirtualProcess(self._cluster, place)
        await process.start(invitation, wait, self._work)
        return process


async def _lose_nodes(cluster: Cluster, launcher: VirtualLauncher, setting: Setting) -> None:
    """Lose nodes one after another, at even distances."""
    distance = 60.0 / (setting.lost_per_minute * setting.nodes)
    random = generator(0, "losses")
    while True:
        await asyncio.sleep(distance)
        place = random.randrange(setting.nodes) + 1
        launcher.away[place] = cluster.loop.time() + _AWAY_SECONDS
        if place in cluster.nodes:
            cluster.nodes[place].lose()


def simulate(setting: Setting, costs: Costs) -> Outcome:
    """Play all episodes of a setting."""
    begun = time.process_time()

    async def play(loop: VirtualLoop) -> Outcome:
        cluster = Cluster(loop, costs, setting.work.tokens)
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "run.db") as journal:
            assert journal._writer is not None
            journal._writer.close()
            journal._writer = VirtualWriter(journal.path, cluster)
            launcher = VirtualLauncher(cluster, replace(setting.work, tokens=_SMALL))
            async with playing(
                journal, launcher, runners=setting.nodes, episodes_each=setting.each
            ) as started:
                await _play(cluster, launcher, setting, started)
                outcome = _outcome(cluster, setting)
        return outcome

    outcome = scale_clock.run(play)
    outcome.real_seconds = time.process_time() - begun
    outcome.peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return outcome


async def _play(cluster: Cluster, launcher: VirtualLauncher, setting: Setting, started: Playing) -> None:
    losing = (
        asyncio.ensure_future(_lose_nodes(cluster, launcher, setting)) if setting.lost_per_minute else None
    )
    episodes = int(setting.rounds * setting.at_once)
    try:
        async with asyncio.timeout(setting.until):
            await started.play(episodes)
    except TimeoutError:
        return
    finally:
        if losing is not None:
            losing.cancel()
    steps = episodes * (setting.work.calls + OTHER_STEPS)
    stored = sum(1 for _ in started.journal.scan())
    if stored != steps:
        raise SystemExit(f"{setting}: {stored} steps are stored, and not {steps}")


def _outcome(cluster: Cluster, setting: Setting) -> Outcome:
    calls = cluster.committed
    first, last = calls[int(EDGE * len(calls))], calls[int((1 - EDGE) * len(calls)) - 1]
    seconds = last[0] - first[0]
    waits = sorted(cluster.waits[int(EDGE * len(calls)) : int((1 - EDGE) * len(calls))])
    episodes = int(setting.rounds * setting.at_once)
    is_whole = setting.until is None
    head, journal, network = ((last[at] - first[at]) / seconds for at in (1, 2, 3))
    return Outcome(
        setting,
        seconds=cluster.loop.time(),
        calls_per_s=(1 - 2 * EDGE) * len(calls) / seconds,
        head=head,
        journal=journal,
        network=network,
        waits=(statistics.median(waits), waits[int(0.99 * len(waits))]),
        played_again=cluster.counts["plays"] - episodes if is_whole else None,
        calls_again=cluster.counts["calls"] - episodes * setting.work.calls if is_whole else None,
        beats=cluster.counts["beats"],
    )


WORK = Work(calls=5, tokens=1024, seconds=10.0)


def settings(quick: bool) -> Sequence[Setting]:
    """Ten nodes to a thousand, with a hundred episodes each; and some of which one in a hundred is lost."""
    if quick:
        return [Setting(3, 100, WORK), Setting(10, 100, WORK), Setting(10, 100, WORK, lost_per_minute=0.1)]
    return [
        Setting(10, 100, WORK, rounds=3.0),
        Setting(30, 100, WORK, rounds=3.0),
        Setting(100, 100, WORK, rounds=2.0),
        Setting(100, 20, WORK, rounds=4.0, lost_per_minute=0.01),
        Setting(100, 20, WORK, rounds=4.0, lost_per_minute=0.1),
        Setting(300, 100, WORK, until=45.0),
        Setting(1000, 100, WORK, until=60.0),
    ]


def measured_costs(quick: bool) -> Costs:
    """The costs of the head of this machine, measured now."""
    head = measure_head(1024, *((100, 3) if quick else (400, 10)))
    beat = measure_beats(*((2, 2) if quick else (5, 5)))
    return Costs(
        call=(head.call_loop.mean + head.call_writer.mean) / 1e6,
        episode=max(0.0, head.episode_loop.mean + head.episode_writer.mean) / 1e6,
        beat=beat.mean / 1e6 * 0.25,
        step=head.call_writer.mean / 1e6,
    )
