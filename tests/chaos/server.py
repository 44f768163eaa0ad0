"""A server that is asked what nobody should ask, and kept busy by clients that send slowly, nothing, or
much at once.
"""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.chaos.health import health_watched
from tests.chaos.scene import Figures, Scene
from tests.corpus import gateway_cases, play, server_cases, some
from tests.server.process import ServerProcess

_MODEL = "tiny"
_SLOW = (100, 10)
"""Clients that send their heads byte by byte, and as many bodies."""
_IDLE = (2000, 300)
_AT_ONCE = (1000, 150)
"""Requests. All of these in full, and with `--quick`."""
_CONNECTIONS = 256
_BODY_SECONDS = 5
_PATIENCE = 120.0
"""Seconds for any answer, on a machine that others keep busy too."""


def corpus(scene: Scene) -> Figures:
    """Every request of the tests' corpus to one server, which has to be well afterwards."""
    cases = gateway_cases(_MODEL) + server_cases(_MODEL)
    cases = some(cases, 24) if scene.quick else cases
    scene.note(f"{len(cases)} requests that no client should send")
    problems, statuses = [], Counter[int]()
    with _server(scene, "corpus") as server, server.http(timeout=_PATIENCE) as http:
        for outcome in play(http, cases):
            statuses[outcome.status] += 1
            problems += [outcome.problem] if outcome.problem else []
        if (status := http.get("/health").status_code) != 200:
            problems.append(f"afterwards /health answers {status}")
        answer = http.post("/v1/completions", json={"model": _MODEL, "prompt": "yes", "max_tokens": 2})
        if answer.status_code != 200 or not answer.json()["usage"]["completion_tokens"]:
            problems.append(f"afterwards a completion is answered with {answer.status_code}: {answer.text}")
    failed = sum(count for status, count in statuses.items() if status >= 500 or status == 0)
    by_status = {str(status): count for status, count in sorted(statuses.items())}
    return {"requests": len(cases), "http_500": failed, "statuses": by_status, "problems": problems}


def connections(scene: Scene) -> Figures:
    """Clients of three kinds that are in the way of others, and whether these are served beside them."""
    _allow_files(2 * _IDLE[0] + 1000)
    options = ("--max-connections", str(_CONNECTIONS), "--body-timeout", str(_BODY_SECONDS))
    with _server(scene, "connections", *options) as server:
        host, port = server.address.removeprefix("http://").split(":")
        crowd = _Crowd(host, int(port))
        counts = [part[scene.quick] for part in (_SLOW, _IDLE, _AT_ONCE)]
        scene.note(
            f"{2 * counts[0]} slow senders, {counts[1]} idle connections, {counts[2]} requests at once"
        )
        slow, idle, many = asyncio.run(crowd.all(*counts))
    figures = {"slow senders": slow, "idle connections": idle, "requests at once": many}
    return {
        "http_500": sum(
            count for each in figures.values() for name, count in each["refused"].items() if name[0] == "5"
        ),
        "problems": crowd.problems,
        "crowds": figures,
    }


def _server(scene: Scene, name: str, *options: str) -> ServerProcess:
    from etude.models.tiny import TinyShape, build_policy, build_tokenizer

    model = scene.folder / _MODEL
    if not model.exists():
        tokenizer = build_tokenizer(["what is 1 + 2? it is 3. yes or no? yes, no."], vocab_size=300)
        shape = TinyShape(hidden_size=32, heads=2, intermediate_size=48, max_context=128)
        build_policy(tokenizer, 0, shape).export(model)
    data = scene.folder / f"server-{name}"
    data.mkdir()
    return ServerProcess(model, data, *options)


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


class _Crowd:
    """Clients of one server."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self.problems: list[str] = []

    async def all(self, slow: int, idle: int, at_once: int) -> tuple[dict[str, Any], ...]:
        """The figures of each crowd; one after another."""
        return await self._slow(slow), await self._idle(idle), await self._many(at_once)

    async def _slow(self, count: int) -> dict[str, Any]:
        """Heads and bodies byte by byte: each has to be refused with the name of the limit."""
        head = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-Long: "
        body = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
        senders = [asyncio.ensure_future(self._sends_slowly(begin)) for begin in [head, body] * count]
        beside = await self._beside(senders)
        answers = await asyncio.gather(*senders)
        for answer in answers:
            self._require_limit("a slow sender", answer, 408, "seconds")
        return beside | {"refused": _counted(answers)}

    async def _sends_slowly(self, begin: bytes) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        writer.write(begin)
        answer = asyncio.ensure_future(_answer_of(reader))
        while not answer.done():
            writer.write(b"x")
            await asyncio.wait([answer], timeout=0.5)
        writer.close()
        return await answer

    async def _idle(self, count: int) -> dict[str, Any]:
        """Connections that say nothing: they have to make place for those that do."""
        opened = asyncio.ensure_future(self._open(count))
        beside = await self._beside([opened])
        beside |= await self._beside([asyncio.ensure_future(asyncio.sleep(1.0))])
        answers = []
        for reader, writer in await opened:
            answers.append(await _answer_of(reader))
            writer.close()
        for answer in answers:
            self._require_limit(
                "an idle connection", answer, 408, "connections: this one made room", "seconds"
            )
        return beside | {"refused": _counted(answers)}

    async def _open(self, count: int) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        return [await asyncio.open_connection(self._host, self._port) for _ in range(count)]

    async def _many(self, count: int) -> dict[str, Any]:
        """Requests at once: each is answered well, or refused with the name of the limit."""
        data = json.dumps({"model": _MODEL, "prompt": "yes or no?", "max_tokens": 20}).encode()
        with self._health() as health:
            answers = await asyncio.gather(
                *[self._request("POST", "/v1/completions", data) for _ in range(count)]
            )
        refused = [answer for answer in answers if answer[0] != 200]
        for answer in refused:
            self._require_limit("one of many requests", answer, 429, f"{_CONNECTIONS} connections")
        return health | {"served": len(answers) - len(refused), "refused": _counted(refused)}

    async def _beside(self, crowd: Sequence[asyncio.Future[Any]]) -> dict[str, Any]:
        """Normal requests and `/health`, one after another for as long as a crowd is there."""
        data = json.dumps({"model": _MODEL, "prompt": "yes", "max_tokens": 2}).encode()
        served, seconds = 0, 0.0
        with self._health() as health:
            while not all(each.done() for each in crowd):
                begun = time.monotonic()
                status, text = await self._request("POST", "/v1/completions", data)
                seconds = max(seconds, time.monotonic() - begun)
                served += 1
                if status != 200:
                    self.problems.append(
                        f"a normal request beside others was answered {status}: {text[:200]}"
                    )
        return {"served": served, "longest_seconds": round(seconds, 3)} | health

    @contextmanager
    def _health(self) -> Iterator[dict[str, Any]]:
        with health_watched(self._host, self._port) as figures:
            yield figures
        self.problems += figures.pop("problems")

    async def _request(self, method: str, path: str, body: bytes) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await _answer_of(reader)
        writer.close()
        return answer

    def _require_limit(self, who: str, answer: tuple[int, str], status: int, *limits: str) -> None:
        if answer[0] != status or not any(limit in answer[1] for limit in limits):
            self.problems.append(f"{who} was answered {answer[0]}: {answer[1][:200]}")


async def _answer_of(reader: asyncio.StreamReader) -> tuple[int, str]:
    """Status and body of an answer; 0 where there is none."""
    try:
        async with asyncio.timeout(_PATIENCE):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            lengths = [line for line in head.split("\r\n") if line.startswith("content-length")]
            body = await reader.readexactly(int(lengths[0].split(":")[1]))
    except (OSError, EOFError, TimeoutError) as error:
        return 0, repr(error)
    return int(head.split()[1]), body.decode()


def _counted(answers: Sequence[tuple[int, str]]) -> dict[str, int]:
    return dict(Counter(str(status) for status, _ in answers))
