"""A server that is asked what nobody should ask."""

from __future__ import annotations

from collections import Counter

from etude.models.tiny import TinyShape, build_policy, build_tokenizer
from tests.chaos.scene import Figures, Scene
from tests.corpus import gateway_cases, play, server_cases, some
from tests.server.process import ServerProcess

_MODEL = "tiny"
_PATIENCE = 120.0
"""Seconds for any answer, on a machine that others keep busy too."""


def corpus(scene: Scene) -> Figures:
    """Every request of the tests' corpus to one server, which has to be well afterwards."""
    cases = gateway_cases(_MODEL) + server_cases(_MODEL)
    cases = some(cases, 24) if scene.quick else cases
    scene.note(f"{len(cases)} requests that no client should send")
    problems, statuses = [], Counter[int]()
    with _server(scene) as server, server.http(timeout=_PATIENCE) as http:
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


def _server(scene: Scene) -> ServerProcess:
    model, data = scene.folder / _MODEL, scene.folder / "server"
    tokenizer = build_tokenizer(["what is 1 + 2? it is 3. yes or no? yes, no."], vocab_size=300)
    shape = TinyShape(hidden_size=32, heads=2, intermediate_size=48, max_context=128)
    build_policy(tokenizer, 0, shape).export(model)
    data.mkdir()
    return ServerProcess(model, data)
