"""The cost of `etude serve`: the same requests, sent to a vLLM and through the server that runs it.

Needs a real vLLM: ETUDE_TEST_VLLM names its program (docs/server.md says how to install one). The peer is the
very process that the server runs, so that nothing but the way to it differs. The embedded engine answers the
same requests for comparison.
"""

from __future__ import annotations

import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from common import parse_arguments, print_json, print_table, progress, silent

from etude.inference.child_process import marked_process
from etude.models.tiny import TinyShape, build_policy, build_tokenizer

PROGRAM = "ETUDE_TEST_VLLM"
CONCURRENCIES = (1, 8, 64)
TOKENS = 32
QUICK_ON_TWO_CORES = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Place:
    """Where requests are sent, and under which name the model goes there."""

    name: str
    url: str
    model: str
    key: str = "none"


@dataclass(frozen=True)
class Round:
    """Some requests, so many at a time."""

    latencies: list[float]
    seconds: float


async def ask(place: Place, concurrency: int, count: int) -> Round:
    """Send `count` chat requests for logprobs and token ids, each answered with 32 tokens."""
    body = {
        "model": place.model,
        "messages": [{"role": "user", "content": "what is 1 + 2?"}],
        "max_tokens": TOKENS,
        "logprobs": True,
        "return_token_ids": True,
    }
    latencies: list[float] = []
    numbers = iter(range(count))

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            start = time.perf_counter()
            reply = await client.post("/v1/chat/completions", json=body | {"seed": number})
            reply.raise_for_status()
            latencies.append(time.perf_counter() - start)

    headers = {"authorization": f"Bearer {place.key}"}
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=place.url, headers=headers, timeout=600, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
        return Round(latencies, time.perf_counter() - start)


@contextmanager
def server(model: Path, folder: Path, *options: str) -> Iterator[str]:
    """The address of an `etude serve` in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "etude", "serve", str(model), "--port", str(port)]
    command += ["--data-dir", str(folder), "--engine-wait", "300", *options]
    environment = {**os.environ, **QUICK_ON_TWO_CORES}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        if " at http://" not in process.stdout.readline():
            sys.exit("the server did not start; the lines above say why")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def vllm_of(folder: Path, model: Path) -> Place:
    """The vLLM that a server runs: its port is on its command line, its key in its environment."""
    pid = marked_process(folder / "vllm" / "vllm.pid")
    process = Path(f"/proc/{pid}")
    line = (process / "cmdline").read_text().split("\0")
    variables = dict(item.partition("=")[::2] for item in (process / "environ").read_text().split("\0"))
    port = line[line.index("--port") + 1]
    return Place("vLLM alone", f"http://127.0.0.1:{port}", str(model), variables["VLLM_API_KEY"])


def measure(
    places: Sequence[Place], rounds: int, size: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Rows: median latency and requests a second of each place, which take turns."""
    rows = []
    for concurrency in CONCURRENCIES:
        say(f"{concurrency} at a time")
        found: dict[str, list[Round]] = {place.name: [] for place in places}
        for number in range(-1, rounds):
            for place in places if number % 2 else reversed(places):
                one = asyncio.run(ask(place, concurrency, max(concurrency, size)))
                if number >= 0:  # The first warms up.
                    found[place.name].append(one)
        for name, taken in found.items():
            latency = statistics.median(value for one in taken for value in one.latencies)
            rate = statistics.median(len(one.latencies) / one.seconds for one in taken)
            rows.append({"place": name, "concurrency": concurrency, "ms_p50": 1e3 * latency, "rate": rate})
    return rows


def main() -> None:
    """The command line."""
    arguments = parse_arguments(__doc__.splitlines()[0])
    say = silent if arguments.json else progress
    program = os.environ.get(PROGRAM)
    if not program:
        sys.exit(f"set {PROGRAM} to vLLM's program; docs/server.md says how to install one")
    rounds, size = (3, 32) if arguments.quick else (7, 128)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = folder / "tiny"
        tokenizer = build_tokenizer(["what is 1 + 2? it is 3. yes or no? yes, no."], vocab_size=300)
        # Heads of 32: vLLM takes none that are smaller.
        build_policy(tokenizer, 0, TinyShape(hidden_size=64, heads=2, max_context=256)).export(model)
        options = ("--engine", "vllm", "--vllm-command", program, "--vllm-arg=--enforce-eager")
        say("starting vLLM")
        with (
            server(model, folder / "vllm", *options) as through,
            server(model, folder / "embedded") as embedded,
        ):
            places = [
                vllm_of(folder / "vllm", model),
                Place("vLLM through etude serve", through, "tiny"),
                Place("etude serve, embedded engine", embedded, "tiny"),
            ]
            rows = measure(places, rounds, size, say)
    alone, served = (
        {row["concurrency"]: row for row in rows if row["place"] == place.name} for place in places[:2]
    )
    result = {
        "overhead_ms_p50": served[1]["ms_p50"] - alone[1]["ms_p50"],
        "overhead_share": {str(n): alone[n]["rate"] / served[n]["rate"] - 1 for n in CONCURRENCIES},
        "settings": rows,
    }
    if arguments.json:
        print_json(result)
        return
    print_table(
        f"Chat completions of {TOKENS} tokens with logprobs and token ids",
        ["to", "at a time", "ms, median", "requests/s"],
        [
            [row["place"], str(row["concurrency"]), f"{row['ms_p50']:.1f}", f"{row['rate']:.1f}"]
            for row in rows
        ],
        [
            f"the way through the server: {result['overhead_ms_p50']:.1f} ms at 1; "
            + ", ".join(f"{share:+.0%} at {n}" for n, share in result["overhead_share"].items())
        ],
    )


if __name__ == "__main__":
    main()
