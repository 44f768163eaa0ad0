"""A run with ten to a thousand nodes, simulated: the real pool, head, link and journal on virtual machines.

What the head does costs it what was measured (docs/architecture.md), one thing after another; so do the
journal's writer and the head's network. Everything else of a node is waiting: a runner only commits what an
agent would.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
import random
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from common import parse_arguments, print_json, print_table, progress, silent
from harness import StubEngine

from etude.core.call import Call, ChatRequest, Completion, Usage
from etude.core.episode import EpisodeRecord, Example
from etude.core.keys import fold, generator
from etude.engines.ledger import Ledger
from etude.engines.programs import Launcher, ProcessEnd
from etude.processes.head import Head
from etude.processes.link import Disconnected, Notify, RunnerInvitation, RunnerLink, Stream, shake_hands
from etude.processes.pool import RunnerPool
from etude.rollout.collector import Collector, EpisodeJob, Limits
from etude.rollout.evaluator import Scorer
from etude.rollout.workflow import Workflow
from etude.store.database import Operation, Waiter, Writer, _Item, _settle
from etude.store.episodes import call_key, encode_call, encode_episode
from etude.store.journal import Journal

EVALUATOR = "reward"
OTHER_STEPS = 2
"""Of an episode in the journal, besides its calls: its record and its score."""


@dataclass(frozen=True)
class Work:
    """The shape of all episodes."""

    calls: int = 5
    """Turns of one conversation."""
    tokens: int = 1024
    """That each call adds to it: half of them read, half of them sampled."""
    seconds: float = 0.0
    """From one commit to the next call's answer, on average: the model's time and the agent's."""
    spread: float = 0.5
    """The standard deviation of the logarithm of that time."""

    def wait(self, episode: str, turn: int) -> float:
        """Seconds before a call is answered; the same for the same call."""
        normal = random.Random(fold(0, episode, turn)).gauss(-(self.spread**2) / 2, self.spread)
        return self.seconds * math.exp(normal)


@functools.cache
def conversation(work: Work) -> list[Call]:
    """The calls of an episode."""
    half, calls, ids = work.tokens // 2, [], tuple[int, ...]()
    messages: tuple[dict[str, Any], ...] = ()
    for turn in range(work.calls):
        messages += ({"role": "user", "content": "wor " * half},)
        ids += tuple(range(1000, 1000 + half))
        completion = Completion(
            message={"role": "assistant", "content": "wor " * half},
            prompt_ids=ids,
            completion_ids=tuple(range(2000, 2000 + half)),
            logprobs=tuple(-0.1234567 * (1 + place % 7) for place in range(half)),
            usage=Usage(len(ids), half),
        )
        calls.append(Call(turn, "workflow", "policy", ChatRequest(messages), completion))
        messages += (completion.message,)
        ids += completion.completion_ids or ()
    return calls


@functools.cache
def make_steps(work: Work) -> dict[str, Any]:
    """The steps that an episode commits for its calls, by the call's name."""
    steps: dict[str, Any] = {}
    parent: tuple[str, Call] | None = None
    for turn, call in enumerate(conversation(work)):
        name = f"turn{turn}/0"
        steps[name] = encode_call(call, parent)
        parent = name, call
    return steps


class ShapedRunner:
    """Answers the head."""

    def __init__(self, stream: Stream, work: Work, on_commit: Callable[[float], None]) -> None:
        self.link = RunnerLink(stream, self._answer)
        self._work = work
        self._on_commit = on_commit
        self._steps = make_steps(work)
        # Every conversation begins with these calls; only their names are kept with an episode.
        self._names = dict(enumerate(self._steps))
        self._calls = [replace(call, completion=None) for call in conversation(replace(work, tokens=2))]

    async def _answer(self, method: str, parameters: dict[str, Any], note: Notify) -> Any:
        if method == "play":
            await self._play(**parameters)
        return {"calls": {}} if method == "ping" else None

    async def _play(
        self, id: str, generation: int, example: dict[str, Any], steps: Mapping[str, Any], **_: Any
    ) -> None:
        for turn, (name, step) in enumerate(self._steps.items()):
            key = call_key(id, name)
            if key not in steps:
                await asyncio.sleep(self._work.wait(id, turn))
                asked_at = asyncio.get_running_loop().time()
                await self._put(key, step)
                self._on_commit(asyncio.get_running_loop().time() - asked_at)
        if id not in steps:
            record = EpisodeRecord(id, Example(**example), generation, tuple(self._calls), output="done")
            await self._put(id, encode_episode(record, self._names))
        score = f"{id}/score/{EVALUATOR}"
        if score not in steps:
            await self._put(score, {"score": 1.0, "reasoning": None, "error": None})

    async def _put(self, key: str, value: Any) -> None:
        await self.link.ask("put", {"key": key, "value": value})


async def run(
    stream: Stream, number: int, key: bytes, work: Work, on_commit: Callable[[float], None] = lambda _: None
) -> None:
    """Be a runner until the head is gone. `on_commit` is told the seconds that each call's commit took."""
    try:
        await shake_hands(stream, number, lambda number: key)
    except Disconnected:
        return
    await ShapedRunner(stream, work, on_commit).link.serve()


@dataclass
class Playing:
    """A pool of runners with its journal, and what collects episodes from it."""

    journal: Journal
    pool: RunnerPool
    collector: Collector
    numbers: Iterator[int]

    async def play(self, episodes: int) -> None:
        """Have so many new episodes played, as many at a time as there is room for."""
        jobs = (
            EpisodeJob(f"train/1/q{number}/0", Example(f"q{number}", {"question": "why?"}))
            for number in itertools.islice(self.numbers, episodes)
        )
        async with aclosing(self.collector.collect(jobs)) as records:
            async for record in records:
                if record.failure is not None:
                    raise SystemExit(f"{record.id}: {record.failure}")


async def _empty_workflow(example: Any, episode: Any) -> None:
    """Runners play the workflow."""


def _never(example: Any, output: Any) -> float:
    """Runners score."""
    raise AssertionError


@asynccontextmanager
async def playing(
    journal: Journal, launcher: Launcher, *, runners: int, episodes_each: int
) -> AsyncIterator[Playing]:
    """A pool of runners, which are started when episodes need them."""
    at_once = runners * episodes_each
    head = Head(journal, {}, frozenset(), patience=3600.0, ledger=Ledger(journal, {}, None))
    scorer = Scorer({EVALUATOR: _never}, journal, timeout=60.0, max_concurrency=at_once)
    limits = Limits(at_once, None)
    sizes = {"runners": runners, "episodes_each": episodes_each}
    async with RunnerPool(head, launcher, scorer, {}, logs=Path(), **sizes) as pool:
        collector = Collector(
            Workflow("shaped", _empty_workflow), {"policy": StubEngine()}, journal, limits=limits, runner=pool
        )
        yield Playing(journal, pool, collector, itertools.count())


T = TypeVar("T")


class Listening:
    """A server, as far as it has a port and is closed."""

    def __init__(self, port: int) -> None:
        self.port, self.sockets = port, [self]

    def getsockname(self) -> tuple[str, int]:
        return "", self.port

    def close(self) -> None:
        """Nobody calls any more."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs what is due, and then goes to the time of what is due next."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self
        self.servers: dict[str, Callable[[], asyncio.Protocol]] = {}
        """Those that listen, by their addresses."""

    def time(self) -> float:
        return self._now

    def select(self, seconds: float | None) -> list[Any]:
        """Let so many seconds pass, as a selector that nothing happens to does."""
        if seconds is None:
            raise RuntimeError("everything waits for something, and nothing is due any more")
        if seconds > 0:
            # Exactly there: a sum of differences would fall short of it.
            self._now = max(self._now, self._scheduled[0].when())
        return []

    def _process_events(self, events: list[Any]) -> None:
        """There are none."""

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen at a port of this loop's own."""
        port = len(self.servers) + 1
        self.servers[f"{host}:{port}"] = factory
        return Listening(port)


def run_virtually(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """The result of `main`, run to its end in a loop of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))


@dataclass
class Station:
    """Does one thing after another: a processor, a link, a disk."""

    free_at: float = 0.0
    taken: float = 0.0
    """Seconds of work that it was given so far."""

    def done_at(self, arrival: float, seconds: float) -> float:
        """When work that arrives then, and takes so long, is done."""
        self.free_at = max(self.free_at, arrival) + seconds
        self.taken += seconds
        return self.free_at

    def busy_until(self, now: float) -> float:
        """Seconds that it has worked so far."""
        return self.taken - max(0.0, self.free_at - now)


Carry = Callable[[bytes, Callable[[bytes], None]], None]
"""Brings what was written to the other end, in time and in order."""


@dataclass(eq=False)
class Wire(asyncio.Transport):
    """One end of a connection."""

    loop: VirtualLoop
    protocol: asyncio.Protocol
    carry: Carry
    peer: Wire = field(init=False)
    is_closed: bool = False

    def write(self, data: Any) -> None:
        """Have it carried to the other end; into the void where that is closed."""
        if not self.is_closed:
            self.carry(bytes(data), self.peer.receive)

    def receive(self, data: bytes) -> None:
        """Take what the other end has written, or its end."""
        if self.is_closed:
            return
        if data:
            self.protocol.data_received(data)
        else:
            self.abort()

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        """Close both ends; what was written before arrives before."""
        if not self.is_closed:
            self.carry(b"", self.peer.receive)
            self.abort()

    def abort(self) -> None:
        """Close this end; the other one is not told."""
        if not self.is_closed:
            self.is_closed = True
            self.loop.call_soon(self.protocol.connection_lost, None)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def connect(loop: VirtualLoop, path: str, to_server: Carry, to_client: Carry) -> Any:
    """A connection with a listener at a path: reader and writer of the client's end, and its wire."""
    served = loop.servers[path]()
    reader = asyncio.StreamReader(loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    client, server = Wire(loop, protocol, to_server), Wire(loop, served, to_client)
    client.peer, server.peer = server, client
    protocol.connection_made(client)
    served.connection_made(server)
    return reader, asyncio.StreamWriter(client, protocol, reader, loop), client


def frame_bytes(tokens: int) -> int:
    """Bytes on the head's network for a call that a runner has sampled: the step, and its receipt."""
    name, step = [*make_steps(Work(2, tokens)).items()][1]
    asked = ["ask", 10_000, "put", {"key": call_key("train/1/q1000/0", name), "value": step}]
    return sum(4 + len(json.dumps(each, separators=(",", ":"))) for each in (asked, ["answer", 10_000, None]))


_SMALL = 2
"""Tokens of a call in the simulation's own memory and files; it costs what the real size does."""
_DETECTION_SECONDS = 5.0
"""After which a runner on a node that is gone is given up, as of Ray's."""
_AWAY_SECONDS = 60.0
EDGE = 0.2
"""Of the calls, at the beginning and at the end, that are not counted: runners start, episodes run out."""


@dataclass(frozen=True)
class Costs:
    """Seconds that things take: as they were measured, with calls of 1,024 tokens (docs/architecture.md)."""

    call: float = 400e-6
    """Of the head, for each call that a runner commits: of its loop and of the journal's thread, which are of
    one interpreter and wait for each other."""
    episode: float = 100e-6
    """For each episode, besides."""
    beat: float = 100e-6
    """For each look at a runner."""
    step: float = 64e-6
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

    def from_head(self) -> Carry:
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
        self._write([operation for operation, _ in batch])
        # What nobody waits for is a short line of the bill.
        calls = sum(operation is not None and bool(waiters) for operation, waiters in batch)
        seconds = self._cluster.costs.step * calls
        done = self._cluster.disk.done_at(self._cluster.loop.time(), seconds)
        self._is_busy = True
        self._cluster.loop.call_at(done, self._end, batch)

    def _end(self, batch: list[_Item]) -> None:
        self._settled += len(batch)
        self.committed += len(batch)
        self._is_busy = False
        _settle([waiter for _, waiters in batch for waiter in waiters], None)
        if self.waiting:
            self._begin()


class VirtualProcess:
    """A runner on a node of its own."""

    log, begin = Path("nothing"), 0

    def __init__(self, cluster: Cluster, place: int) -> None:
        self.node = f"node{place}"
        self._cluster = cluster
        self._end: asyncio.Future[ProcessEnd] = cluster.loop.create_future()
        self._wire: Wire | None = None
        self._running: asyncio.Task[None] | None = None

    async def start(self, invitation: RunnerInvitation, seconds: float, work: Work) -> None:
        """Call the head after so many seconds, and be a runner."""
        self._running = asyncio.ensure_future(self._run(invitation, seconds, work))

    async def _run(self, invitation: RunnerInvitation, seconds: float, work: Work) -> None:
        await asyncio.sleep(seconds)
        cluster = self._cluster
        reader, writer, self._wire = await connect(
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

    async def wait(self) -> ProcessEnd:
        """Wait for its end."""
        return await asyncio.shield(self._end)

    def kill(self) -> None:
        """End it."""
        if self._running is not None:
            self._running.cancel()
        self._finish(ProcessEnd("was killed by SIGKILL", -9))


class VirtualLauncher:
    """Starts runners on virtual nodes."""

    address = ""

    def __init__(self, cluster: Cluster, work: Work) -> None:
        self._cluster = cluster
        self._work = work
        self.away: dict[int, float] = {}
        """When a place's node is back that was lost."""

    async def launch(self, invitation: Any, log: Path) -> VirtualProcess:
        """Start one, when its node is there."""
        place = int(log.stem)
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
            assert journal.writer is not None
            journal.writer.close()
            journal.writer = VirtualWriter(journal.path, cluster)
            launcher = VirtualLauncher(cluster, replace(setting.work, tokens=_SMALL))
            async with playing(
                journal, launcher, runners=setting.nodes, episodes_each=setting.each
            ) as started:
                await _play(cluster, launcher, setting, started)
                outcome = _outcome(cluster, setting)
        return outcome

    outcome = run_virtually(play)
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


def measure(setting: Setting, costs: Costs) -> dict[str, Any]:
    """The figures of one setting; seconds are of the virtual clock."""
    outcome = simulate(setting, costs)
    return {
        "nodes": setting.nodes,
        "at_once": setting.at_once,
        "lost_per_minute": setting.lost_per_minute,
        "calls_per_s_wanted": round(setting.at_once / setting.work.seconds),
        "calls_per_s": round(outcome.calls_per_s),
        "head": outcome.head,
        "journal": outcome.journal,
        "network": outcome.network,
        "commit_ms": {"median": round(1000 * outcome.waits[0], 1), "p99": round(1000 * outcome.waits[1], 1)},
        "episodes_begun_again": outcome.played_again,
        "calls_committed_again": outcome.calls_again,
        "seconds": outcome.seconds,
        "cpu_seconds_of_the_simulation": outcome.real_seconds,
        "peak_mb_of_the_simulation": outcome.peak_mb,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate ten nodes to a thousand, and nodes that are lost, and print."""
    flags = parse_arguments(__doc__ or "", arguments)
    note, rows = silent if flags.json else progress, []
    for setting in settings(flags.quick):
        note(f"{setting.nodes} nodes, {setting.at_once} at once, {setting.lost_per_minute:.0%} lost a minute")
        rows.append(measure(setting, Costs()))
    if flags.json:
        parts = {"settings": [row for row in rows if not row["lost_per_minute"]]}
        parts["with_lost_nodes"] = [row for row in rows if row["lost_per_minute"]]
        print_json({"costs": asdict(Costs()), **parts}, {})
        return
    for row in rows:
        shown = [(name.replace("_", " "), _show_value(value)) for name, value in row.items()]
        print_table(f"{row['nodes']} nodes", ("", ""), shown, [])


def _show_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show_value(each)}" for name, each in value.items())
    return "–" if value is None else f"{value:,.4g}"


if __name__ == "__main__":
    main()
