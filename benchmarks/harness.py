"""The cost of collecting: workflow, calls, journal, scores, trajectories. The model answers at once.

Everything is the ordinary machinery, put together from a config as `etude train` does it. CPU time is of
this process, all threads, from the start of a collection to the finished trajectories. The HTTP model is
a server in another process.
"""

from __future__ import annotations

import asyncio
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

from common import parse_arguments, print_json, print_table, progress, silent

import etude
from etude.algorithms.collecting import CollectingBuilder
from etude.config.load import parse_config
from etude.core.call import ChatRequest, Completion, Usage
from etude.core.job import ModelVersion
from etude.core.sample import TrajectoryCollection
from etude.runtime import open_runtime
from etude.store.run_folder import RunFolder

TOKENS = 32
"""Tokens of an answer, the end of turn included."""

START, END, FIRST_WORD = 1, 2, 10

Message = dict[str, Any]


def words(start: int, count: int) -> str:
    """`count` words that follow from `start`."""
    return " ".join([f"w{(start * 31 + place * 17) % 990}" for place in range(count)])


def word_tokens(text: str) -> list[int]:
    """A token for each word."""
    return [FIRST_WORD + int(word[1:]) for word in text.split()]


def prompt_tokens(messages: Sequence[Message]) -> list[int]:
    """The whole prompt, up to the point where the assistant is to speak."""
    ids: list[int] = []
    for message in messages:
        ids += (START, *word_tokens(message["content"]), END)
    return [*ids, START]


def answer_text(seed: int) -> str:
    """The answer to a request of this seed."""
    return words(seed, TOKENS - 1)


def logprobs() -> list[float]:
    """Any numbers: nothing here looks at them."""
    return [-0.015625 * (1 + place) for place in range(TOKENS)]


class StubEngine:
    """Answers at once, in this process."""

    version = 0

    async def complete(self, request: ChatRequest) -> Completion:
        """An answer that follows from the request's key."""
        text = answer_text(request.key % 1000)
        prompt_ids = prompt_tokens(request.messages)
        return Completion(
            message={"role": "assistant", "content": text},
            prompt_ids=tuple(prompt_ids),
            completion_ids=(*word_tokens(text), END),
            logprobs=tuple(logprobs()),
            usage=Usage(len(prompt_ids), TOKENS),
        )

    async def adopt(self, version: ModelVersion) -> None:
        """There are no weights."""

    async def close(self) -> None:
        """There is nothing to free."""


_STUB = "--stub"
"""With it, this program is the server that answers at once."""


@contextmanager
def running_server() -> Iterator[str]:
    """The base URL of a server in another process."""
    with server_process() as (url, _):
        yield url


@contextmanager
def server_process(seconds: float = 0.0) -> Iterator[tuple[str, Popen[str]]]:
    """The base URL of a server in another process, and that process; an answer takes `seconds` on average."""
    with Popen([sys.executable, __file__, _STUB, str(seconds)], stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1", process
        finally:
            process.terminate()


class _Connection(asyncio.Protocol):
    """Just enough of HTTP/1.1 for a client that sends one request at a time on each connection."""

    seconds = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = next(
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        )
        if len(rest) < length:
            return
        self._received = rest[length:]
        request = json.loads(rest[:length])
        if self.seconds:
            # The same for a request whenever it is made, so that the same episodes take the same time.
            wait = self.seconds * (0.5 + request["seed"] % 1000 / 1000)
            asyncio.get_running_loop().call_later(wait, self._answer, request)
        else:
            self._answer(request)

    def _answer(self, request: dict[str, Any]) -> None:
        body = _chat_completion(request)
        answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self._transport.write(answer + body)


def _chat_completion(request: dict[str, Any]) -> bytes:
    text = answer_text(request["seed"] % 1000)
    prompt_ids = prompt_tokens(request["messages"])
    content: list[Message] = [
        {"token": word, "logprob": logprob, "bytes": None, "top_logprobs": []}
        for word, logprob in zip([*text.split(), "<end>"], logprobs(), strict=True)
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text, "refusal": None, "tool_calls": []},
        "finish_reason": "stop",
        "logprobs": {"content": content},
        "token_ids": [*word_tokens(text), END],
    }
    reply = {
        "id": "chatcmpl-stub",
        "object": "chat.completion",
        "created": 0,
        "model": request["model"],
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt_ids),
            "completion_tokens": TOKENS,
            "total_tokens": len(prompt_ids) + TOKENS,
        },
        "prompt_token_ids": prompt_ids,
    }
    return json.dumps(reply).encode()


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


@dataclass(frozen=True)
class Reference:
    """The cost of the same work in another harness."""

    source: str
    cpu_ms: Mapping[tuple[int, int], float]
    """CPU milliseconds per trajectory, by calls per episode and concurrency."""
    rss_mb_per_1000_episodes: float


REFERENCE = Reference(
    source="NVIDIA NeMo Agent Toolkit 1.9.0 as released, with its OpenPipe ART plug-in and a minimal "
    "LangChain workflow on the OpenAI client; an instant server on the same machine, 32 output tokens with "
    "top-1 logprobs, a trivial evaluator; medians of three runs on a shared machine, 2 cores, no GPU",
    cpu_ms={(1, 8): 14.3, (1, 64): 16.7, (5, 8): 71.5, (5, 64): 75.8},
    rss_mb_per_1000_episodes=1150.0,
)
CONCURRENCIES = (8, 64)

GENERATIONS = 8
WORD_COUNT = 12
NO_SERVER = "http://localhost"
"""An address for runs that never use it."""


@dataclass(frozen=True)
class Setting:
    """One way to collect."""

    transport: str
    """`inprocess` or `http`."""
    calls: int
    """Model calls of an episode, turns of one conversation."""
    concurrency: int

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.transport}, calls: {self.calls}, at once: {self.concurrency}"


@dataclass(frozen=True)
class Cost:
    """The cost of one setting."""

    cpu_ms: float
    """CPU milliseconds per trajectory."""
    per_second: float
    """Trajectories per second of wall time."""


SETTINGS = [
    Setting(transport, calls, concurrency)
    for transport in ("inprocess", "http")
    for calls in (1, 5)
    for concurrency in CONCURRENCIES
]


@etude.workflow
async def converse(example: etude.Example, episode: etude.Episode, turns: int) -> str:
    """A conversation of `turns` calls, each of which continues the one before."""
    messages = [{"role": "user", "content": example.inputs["question"]}]
    for turn in range(turns):
        reply = await episode.chat(messages)
        messages += [reply.message, {"role": "user", "content": words(turn, WORD_COUNT)}]
    return reply.text


@etude.evaluator
def trivial(example: etude.Example, output: str) -> float:
    """Any number, not the same for all; a plain function, as most evaluators are."""
    return int(output[1 : output.index(" ")]) / 990


def questions(count: int) -> list[dict[str, Any]]:
    """The dataset."""
    return [{"id": f"q{number}", "question": words(number, WORD_COUNT)} for number in range(count)]


def config_data(setting: Setting, examples: int, base_url: str) -> dict[str, Any]:
    """A mapping with the content of the config file of a run that collects `examples` groups of episodes."""
    llm: dict[str, Any] = {"_type": "openai", "model_name": "stub", "base_url": base_url, "max_tokens": 64}
    return {
        "llms": {"policy": llm | {"return_token_ids": True}},
        "workflow": {"_type": "harness:converse", "arguments": {"turns": setting.calls}},
        "eval": {
            "general": {
                "max_concurrency": setting.concurrency,
                "dataset": {"_type": "harness:questions", "arguments": {"count": examples}},
            },
            "evaluators": {"trivial": {"_type": "harness:trivial"}},
        },
        "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": GENERATIONS}},
        "finetuning": {"enabled": True},
    }


def config_for(setting: Setting, examples: int, base_url: str) -> etude.Config:
    """The config of a run that collects `examples` groups of episodes."""
    return parse_config(config_data(setting, examples, base_url))


async def collect(
    setting: Setting,
    episodes: int,
    base_url: str,
    *,
    epochs: int = 1,
    each_epoch: Callable[[], None] = lambda: None,
) -> Cost:
    """Collect `epochs` times `episodes` episodes into a new run folder; the cost of all but the set-up."""
    config = config_for(setting, episodes // GENERATIONS, base_url)
    engines = {"policy": StubEngine()} if setting.transport == "inprocess" else {}
    with tempfile.TemporaryDirectory() as folder, RunFolder.create(folder, "run") as run:
        async with open_runtime(config, run, engines=engines) as runtime:
            builder = await runtime.builder.get_trajectory_builder("grpo")
            assert isinstance(builder, CollectingBuilder)
            builder.bind_runtime(runtime)
            builder.token_ids_required = True
            await builder.initialize(config.finetuning)
            cpu, wall = time.process_time(), time.perf_counter()
            for epoch in range(epochs):
                await builder.start_run(f"epoch-{epoch}", {"epoch": epoch})
                require_complete(await builder.finalize(f"epoch-{epoch}"), setting, episodes)
                each_epoch()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    count = episodes * epochs
    return Cost(cpu_ms=1000 * cpu / count, per_second=count / wall)


def require_complete(collection: TrajectoryCollection, setting: Setting, episodes: int) -> None:
    """A benchmark of work that was not done would be a fast one."""
    items = [item for group in collection.trajectories for one in group for item in one.episode]
    sampled = [item for item in items if item.role == "assistant"]  # type: ignore[union-attr]
    if len(collection) != episodes or len(sampled) != episodes * setting.calls:
        raise SystemExit(f"{setting.name}: {len(collection)} trajectories of {episodes} episodes")


def measure(setting: Setting, episodes: int, repeats: int, base_url: str) -> Cost:
    """The median of several collections."""
    costs = [asyncio.run(collect(setting, episodes, base_url)) for _ in range(repeats)]
    return Cost(
        statistics.median(cost.cpu_ms for cost in costs), statistics.median(cost.per_second for cost in costs)
    )


@dataclass(frozen=True)
class Memory:
    """Resident memory of one run of several epochs, in MB."""

    after_first: float
    """After the first epoch."""
    after_last: float
    peak: float
    episodes: int

    @property
    def growth_per_1000(self) -> float:
        """Growth of the whole run for each thousand episodes after the first epoch."""
        return (self.after_last - self.after_first) / (self.episodes / 1000)


def measure_memory(epochs: int, episodes: int) -> Memory:
    """A run of `epochs` epochs of `episodes` episodes, in process, 1 call."""
    setting, sizes = Setting("inprocess", 1, 64), []

    def each_epoch() -> None:
        sizes.append(rss_mb())

    asyncio.run(collect(setting, episodes, NO_SERVER, epochs=epochs, each_epoch=each_epoch))
    return Memory(sizes[0], sizes[-1], max(peak_rss_mb(), *sizes), epochs * episodes)


def rss_mb() -> float:
    """Resident memory of this process now; the peak so far where the system does not tell."""
    status = Path("/proc/self/status")
    if not status.exists():
        return peak_rss_mb()
    line = next(line for line in status.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024


def peak_rss_mb() -> float:
    """The most resident memory that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 * 1024 if sys.platform == "darwin" else 1024)


def measure_all(quick: bool, repeats: int, note: Callable[[str], None]) -> tuple[Memory, dict[Setting, Cost]]:
    """Memory and all settings; `note` is told what is measured next."""
    note("memory")
    memory = measure_memory(epochs=20, episodes=1000)  # First: the peak of a process never falls again.
    episodes, costs = 400 if quick else 1000, {}
    with running_server() as base_url:
        for setting in SETTINGS:
            note(setting.name)
            size = episodes if setting.calls == 1 else 2 * episodes // 5
            costs[setting] = measure(setting, size, repeats, base_url)
    return memory, costs


def as_json(memory: Memory, costs: dict[Setting, Cost]) -> dict[str, Any]:
    """The object that `--json` prints; figures without a setting are at concurrency 64.

    `trajectories_per_s` is in process with 1 call; `settings` has all of them.
    """
    cpu: dict[str, dict[str, float]] = {"inprocess": {}, "http": {}}
    for setting, cost in costs.items():
        if setting.concurrency == max(CONCURRENCIES):
            cpu[setting.transport][f"calls{setting.calls}"] = round(cost.cpu_ms, 3)
    return {
        "cpu_ms_per_trajectory": cpu,
        "trajectories_per_s": round(costs[Setting("inprocess", 1, max(CONCURRENCIES))].per_second, 1),
        "peak_rss_mb": round(memory.peak, 1),
        "rss_growth_mb_per_1000_episodes": round(memory.growth_per_1000, 3),
        "settings": [
            {
                "transport": setting.transport,
                "calls": setting.calls,
                "concurrency": setting.concurrency,
                "cpu_ms_per_trajectory": round(cost.cpu_ms, 3),
                "reference_cpu_ms": REFERENCE.cpu_ms[setting.calls, setting.concurrency],
                "trajectories_per_s": round(cost.per_second, 1),
            }
            for setting, cost in costs.items()
        ],
    }


def print_results(memory: Memory, costs: dict[Setting, Cost]) -> None:
    """The table, with the reference beside what was measured."""
    rows = []
    for setting, cost in costs.items():
        theirs = REFERENCE.cpu_ms[setting.calls, setting.concurrency]
        where = "in process" if setting.transport == "inprocess" else "over HTTP"
        what = (where, str(setting.calls), str(setting.concurrency))
        measured = (f"{cost.cpu_ms:.2f}", f"{theirs:.1f}", f"{theirs / cost.cpu_ms:.1f} x")
        rows.append((*what, *measured, f"{cost.per_second:.0f}"))
    print_table(
        "Collecting, every call journalled: CPU ms per trajectory",
        ("model", "calls", "at once", "Etude", "reference", "better by", "trajectories/s"),
        rows,
        [
            f"memory over {memory.episodes:,} episodes: {memory.after_first:.0f} MB after the first 1,000, "
            f"{memory.after_last:.0f} MB after the last, peak {memory.peak:.0f} MB "
            f"(reference: {REFERENCE.rss_mb_per_1000_episodes:,.0f} MB for 1,000)",
            f"reference: {REFERENCE.source}",
        ],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table or JSON."""
    flags = parse_arguments(str(__doc__), arguments)
    repeats = 1 if flags.quick else 3
    memory, costs = measure_all(flags.quick, repeats, silent if flags.json else progress)
    if flags.json:
        print_json(as_json(memory, costs), {"collections": repeats})
    else:
        print_results(memory, costs)


if __name__ == "__main__":
    if _STUB in sys.argv:
        _Connection.seconds = float(sys.argv[2])
        asyncio.run(_serve())
    else:
        main()
