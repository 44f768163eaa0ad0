"""A server that is asked what nobody should ask, and much at once: two parts of the faults."""

from __future__ import annotations

import asyncio
import json
import resource
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.chaos.scene import Figures, Scene
from tests.corpus import gateway_cases, play, server_cases, some
from tests.server.process import ServerProcess

_MODEL = "tiny"
_AT_ONCE = (1000, 300)
"""Requests, in full and with `--quick`."""
_CONNECTIONS = 256
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
    """More requests at once than a server takes: each is answered, or refused by its limit."""
    _allow_files(2 * _AT_ONCE[0])
    with _server(scene, "connections", "--max-connections", str(_CONNECTIONS)) as server:
        host, port = server.address.removeprefix("http://").split(":")
        count = _AT_ONCE[scene.quick]
        scene.note(f"{count} requests at once")
        crowd = _Crowd(host, int(port))
        many = asyncio.run(crowd.many(count))
        with server.http(timeout=_PATIENCE) as http:
            if (status := http.get("/health").status_code) != 200:
                crowd.problems.append(f"afterwards /health answers {status}")
    return {
        "http_500": sum(count for name, count in many["refused"].items() if name[0] == "5" and name != "503"),
        "problems": crowd.problems,
        "crowds": {"requests at once": many},
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

    async def many(self, count: int) -> dict[str, Any]:
        """Requests at once: each is answered well, or refused because there are too many connections."""
        data = json.dumps({"model": _MODEL, "prompt": "yes or no?", "max_tokens": 20}).encode()
        answers = await asyncio.gather(
            *[self._request("POST", "/v1/completions", data) for _ in range(count)]
        )
        refused = [answer for answer in answers if answer[0] != 200]
        self.problems += [
            f"one of many requests was answered {status}: {text[:200]}"
            for status, text in refused
            if status != 503
        ]
        return {"served": len(answers) - len(refused), "refused": _counted(refused)}

    async def _request(self, method: str, path: str, body: bytes) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = await _answer_of(reader)
        writer.close()
        return answer


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
