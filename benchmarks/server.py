"""The cost of `etude serve`: the same requests, sent to a vLLM and through the server that runs it.

With `--canned` the vLLM is a stand-in that answers at once, and the CPU time of the server's process is
counted as well: what the server itself costs. Otherwise it needs a real vLLM: ETUDE_TEST_VLLM names its
program (docs/backends.md#vllm says how to install one). The peer is the very process that the server runs, so
that nothing but the way to it differs. The embedded engine answers the same requests for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
from common import argument_parser, print_json, print_table, progress, silent

from etude.models.tiny import TinyShape, build_policy, build_tokenizer

TOKENS = 32
"""Tokens of the answer."""
_PROMPT = 24
"""Tokens of every prompt in the answers to chats."""
_IDS = [20 + place for place in range(TOKENS)]
_LOGPROBS = [-0.015625 * (1 + place) - 1e-9 * place for place in range(TOKENS)]


def _answer(kind: str, choice: dict[str, Any]) -> bytes:
    body = {
        "id": "cmpl-8b0c4f6e5d3a4c0f9d5f7a2b1c3d4e5f",
        "object": kind,
        "created": 1_700_000_000,
        "model": "canned",
        "choices": [{"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": _IDS} | choice],
        "service_tier": None,
        "system_fingerprint": None,
        "usage": {
            "prompt_tokens": _PROMPT,
            "total_tokens": _PROMPT + TOKENS,
            "completion_tokens": TOKENS,
            "prompt_tokens_details": None,
        },
        "kv_transfer_params": None,
    }
    return _reply(json.dumps(body, separators=(",", ":")).encode())


def _reply(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ndate: Mon, 23 Nov 2026 10:00:00 GMT\r\nserver: uvicorn\r\n"
    return head + b"content-length: %d\r\ncontent-type: application/json\r\n\r\n%b" % (len(body), body)


def _completion() -> bytes:
    names = [f"token_id:{token}" for token in _IDS]
    logprobs = {
        "text_offset": [0] * TOKENS,
        "token_logprobs": _LOGPROBS,
        "tokens": names,
        "top_logprobs": [{name: value} for name, value in zip(names, _LOGPROBS, strict=True)],
    }
    ids = {"prompt_logprobs": None, "prompt_token_ids": list(range(_PROMPT))}
    return _answer("text_completion", {"text": "it is 3. " * 8, "logprobs": logprobs} | ids)


def _chat() -> bytes:
    content = [
        {"token": "it", "logprob": value, "bytes": [105, 116], "top_logprobs": []} for value in _LOGPROBS
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "it is 3. " * 8,
        "refusal": None,
        "tool_calls": [],
    }
    return _answer("chat.completion", {"message": message, "logprobs": {"content": content}})


_ANSWERS = {"/v1/completions": _completion(), "/v1/chat/completions": _chat()}


class _Connection(asyncio.Protocol):
    """Just enough of HTTP/1.1 for a client that sends one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._received = transport, b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        if len(rest) < (int(lengths[0].partition(b":")[2]) if lengths else 0):
            return
        self._received = b""
        self._transport.write(_ANSWERS.get(head.split(b" ", 2)[1].decode(), _reply(b"{}")))


async def _serve(host: str, port: int) -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, host, port)
    await server.serve_forever()


BATCH = 50
"""Chats between two looks at a process's CPU time."""
_WARM = 4
"""Batches before the first that counts."""


@dataclass(frozen=True)
class Place:
    """Where requests are sent, and under which name the model goes there."""

    name: str
    url: str
    model: str
    key: str = "none"
    pid: int = 0
    """Of its process, where that is known."""

    def chat(self, seed: int) -> dict[str, Any]:
        """A request for so many tokens, with their logprobs and ids."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": "what is 1 + 2?"}],
            "max_tokens": TOKENS,
            "logprobs": True,
            "return_token_ids": True,
            "seed": seed,
        }


@dataclass(frozen=True)
class Taken:
    """Milliseconds: the wall time of each chat, and the CPU time of one of each batch on average."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def canned_command(folder: Path) -> Path:
    """A program that takes the place of vLLM's."""
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{__file__}" "$@"\n')
    program.chmod(0o700)
    return program


def measure_canned(
    places: Mapping[str, Place], batches: int, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """Of each place, by its name: medians over batches that take turns, and over all their chats."""
    say(f"{batches} batches of {BATCH} chats at each of {', '.join(places)}")
    return asyncio.run(_measure(places, batches))


async def _measure(places: Mapping[str, Place], batches: int) -> dict[str, dict[str, Any]]:
    taken = {name: Taken() for name in places}
    clients = {name: _client(place) for name, place in places.items()}
    order: Sequence[str] = list(places)
    try:
        for number in range(-_WARM, batches):
            for name in order if number % 2 else reversed(order):
                await _batch(clients[name], places[name], taken[name] if number >= 0 else Taken())
    finally:
        for client in clients.values():
            await client.aclose()
    return {
        name: {
            "ms_p50": statistics.median(one.wall),
            "cpu_ms_p50": statistics.median(one.cpu),
            "cpu_ms_best": min(one.cpu),
            "chats": len(one.wall),
        }
        for name, one in taken.items()
    }


def _client(place: Place) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=place.url, headers={"authorization": f"Bearer {place.key}"}, timeout=60)


async def _batch(client: httpx.AsyncClient, place: Place, taken: Taken) -> None:
    before = _cpu_seconds(place.pid)
    for number in range(BATCH):
        start = time.perf_counter()
        reply = await client.post("/v1/chat/completions", json=place.chat(number))
        taken.wall.append(1e3 * (time.perf_counter() - start))
        reply.raise_for_status()
        if len(reply.json()["choices"][0]["token_ids"]) != TOKENS:
            sys.exit(f"{place.url} did not answer with {TOKENS} tokens: {reply.text:.300}")
    taken.cpu.append(1e3 * (_cpu_seconds(place.pid) - before) / BATCH)


def _cpu_seconds(pid: int) -> float:
    """The CPU time of all threads of another process (Linux's clock of it; clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


PROGRAM = "ETUDE_TEST_VLLM"
CONCURRENCIES = (1, 8, 64)
QUICK_ON_TWO_CORES = {
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Round:
    """Some requests, so many at a time."""

    latencies: list[float]
    seconds: float


async def ask(place: Place, concurrency: int, count: int) -> Round:
    """Send `count` chat requests for logprobs and token ids, each answered with 32 tokens."""
    latencies: list[float] = []
    numbers = iter(range(count))

    async def work(client: httpx.AsyncClient) -> None:
        for number in numbers:
            start = time.perf_counter()
            reply = await client.post("/v1/chat/completions", json=place.chat(number))
            reply.raise_for_status()
            latencies.append(time.perf_counter() - start)

    headers = {"authorization": f"Bearer {place.key}"}
    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=place.url, headers=headers, timeout=600, limits=limits) as client:
        start = time.perf_counter()
        await asyncio.gather(*(work(client) for _ in range(concurrency)))
        return Round(latencies, time.perf_counter() - start)


@contextmanager
def server(
    model: Path, folder: Path, *options: str, more: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[str, int]]:
    """The address and the process id of an `etude serve`, with `more` variables of the environment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "etude", "serve", str(model), "--port", str(port)]
    command += ["--data-dir", str(folder), "--engine-wait", "300", *options]
    environment = {**os.environ, **QUICK_ON_TWO_CORES, **more}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        if " at http://" not in process.stdout.readline():
            sys.exit("the server did not start; the lines above say why")
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def find_vllm(server: int, model: Path) -> Place:
    """The vLLM that a server runs: its port is on its command line, its key in its environment."""
    process = next(each for each in psutil.Process(server).children() if "--enable-lora" in each.cmdline())
    line, key = process.cmdline(), process.environ()["VLLM_API_KEY"]
    port = line[line.index("--port") + 1]
    return Place("vLLM alone", f"http://127.0.0.1:{port}", str(model), key, process.pid)


def measure(
    places: Sequence[Place], rounds: int, size: int, say: Callable[[str], None]
) -> dict[str, dict[str, dict[str, float]]]:
    """Median latency and requests a second of each place, which take turns, by the requests at a time."""
    rows: dict[str, dict[str, dict[str, float]]] = {place.name: {} for place in places}
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
            rows[name][str(concurrency)] = {"ms_p50": 1e3 * latency, "rate": rate}
    return rows


def build_model(folder: Path) -> Path:
    """A model of the size of the demos'."""
    tokenizer = build_tokenizer(["what is 1 + 2? it is 3. yes or no? yes, no."], vocab_size=300)
    # Heads of 32: vLLM takes none that are smaller.
    build_policy(tokenizer, 0, TinyShape(hidden_size=64, heads=2, max_context=256)).export(folder)
    return folder


def run_canned(against: Path | None, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """The server in front of a vLLM that answers at once; with `against`, another source's too."""
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as running:
        folder = Path(temporary)
        model, program = build_model(folder / "tiny"), canned_command(folder)
        places: dict[str, Place] = {}
        for name, source in (("through", None), *([("against", against)] if against else [])):
            more = {} if source is None else {"PYTHONPATH": str(source)}
            options = ("--engine", "vllm", "--vllm-command", str(program))
            url, pid = running.enter_context(server(model, folder / name, *options, more=more))
            places[name] = Place(name, url, "tiny", pid=pid)
        places["alone"] = find_vllm(places["through"].pid, model)
        found = measure_canned(places, 4 if quick else 20, say)
    overhead = found["through"]["ms_p50"] - found["alone"]["ms_p50"]
    return {"overhead_ms_p50": overhead, "cpu_ms_p50": found["through"]["cpu_ms_p50"], "canned": found}


def print_canned(result: dict[str, Any]) -> None:
    """For people."""
    names = {
        "alone": "the stand-in alone",
        "through": "through etude serve",
        "against": "through etude serve of --against",
    }
    columns = ("ms_p50", "cpu_ms_p50", "cpu_ms_best")
    print_table(
        f"Chats of {TOKENS} tokens with logprobs and token ids, one at a time; the vLLM answers at once",
        ["to", "ms, median", "CPU ms of its process, median of batches", "best batch"],
        [
            [names[name], *(f"{row[column]:.2f}" for column in columns)]
            for name, row in result["canned"].items()
        ],
        [f"n = {result['canned']['through']['chats']} chats each, in turns, {BATCH} to a batch"],
    )


def main() -> None:
    """The command line."""
    parser = argument_parser(__doc__.splitlines()[0])
    parser.add_argument("--canned", action="store_true", help="in front of a stand-in that answers at once")
    parser.add_argument(
        "--against", type=Path, help="with --canned: the source folder of another etude, to take turns with"
    )
    arguments = parser.parse_args()
    say = silent if arguments.json else progress
    if arguments.canned:
        result = run_canned(arguments.against, arguments.quick, say)
        if arguments.json:
            print_json(result, {"chats": result["canned"]["through"]["chats"]})
        else:
            print_canned(result)
        return
    program = os.environ.get(PROGRAM)
    if not program:
        sys.exit(f"set {PROGRAM} to vLLM's program; docs/backends.md#vllm says how to install one")
    rounds, size = (3, 32) if arguments.quick else (7, 128)
    result = in_front_of_vllm(program, rounds, size, say)
    if arguments.json:
        print_json(result, {"rounds in turns": rounds})
    else:
        print_rows(result)


def in_front_of_vllm(program: str, rounds: int, size: int, say: Callable[[str], None]) -> dict[str, Any]:
    """The server in front of a real vLLM, the same vLLM alone, and the embedded engine."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = build_model(folder / "tiny")
        options = ("--engine", "vllm", "--vllm-command", program, "--vllm-arg=--enforce-eager")
        say("starting vLLM")
        with (
            server(model, folder / "vllm", *options) as (through, pid),
            server(model, folder / "embedded") as (embedded, _),
        ):
            places = [
                find_vllm(pid, model),
                Place("vLLM through etude serve", through, "tiny"),
                Place("etude serve, embedded engine", embedded, "tiny"),
            ]
            rows = measure(places, rounds, size, say)
    alone, served = (rows[place.name] for place in places[:2])
    return {
        "overhead_ms_p50": served["1"]["ms_p50"] - alone["1"]["ms_p50"],
        "overhead_share": {n: alone[n]["rate"] / served[n]["rate"] - 1 for n in served},
        "settings": rows,
    }


def print_rows(result: dict[str, Any]) -> None:
    """For people."""
    print_table(
        f"Chat completions of {TOKENS} tokens with logprobs and token ids",
        ["to", "at a time", "ms, median", "requests/s"],
        [
            [place, concurrency, f"{one['ms_p50']:.1f}", f"{one['rate']:.1f}"]
            for place, row in result["settings"].items()
            for concurrency, one in row.items()
        ],
        [
            f"the way through the server: {result['overhead_ms_p50']:.1f} ms at 1; "
            + ", ".join(f"{share:+.0%} at {n}" for n, share in result["overhead_share"].items())
        ],
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:  # In place of vLLM's program.
        parser = argparse.ArgumentParser()
        parser.add_argument("--host")
        parser.add_argument("--port", type=int)
        known, _ = parser.parse_known_args()
        asyncio.run(_serve(known.host, known.port))
    else:
        main()
