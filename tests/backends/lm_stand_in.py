"""A language-model server without a model: what it has beside OpenAI's API, and token ids on request."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import httpx

from etude.backends.lm_server import LanguageModelClient, LmServerAdapter, LmServerAdapterConfig
from etude.core.training_rows import ROWS
from etude.wire.retries import RetryPolicy
from tests.backends.openai_stand_in import BASE, FINAL, KEY, StandIn, error_response

END = 2


class LmStandIn(StandIn):
    """A server that keeps what was asked of its engine in `engine`.

    The engine runs after `slow` requests. It is away, and completions refused, for jobs that say so.
    """

    def __init__(self, *, version: str = version("etude"), slow: int = 0, **options: Any) -> None:
        super().__init__(min_rows=1, **options)
        self.version = version
        self.slow = slow
        self.engine: list[str] = []
        self.status: dict[str, Any] = {
            "object": "engine.status",
            "engine": "embedded",
            "status": "running",
            "away_for_jobs": False,
        }

    def adapter(self, **settings: Any) -> LmServerAdapter:
        """An adapter of it, as another process would make one."""
        return LmServerAdapter(
            LmServerAdapterConfig(**settings), self.client(), self.language_model_client(), BASE
        )

    def language_model_client(self, key: str = KEY, **options: Any) -> LanguageModelClient:
        """A client for the parts beyond OpenAI's API."""
        transport = httpx.MockTransport(self.answer)
        options = {"policy": RetryPolicy(first_wait=0.001), **options}
        return LanguageModelClient("http://stand-in.invalid/v1/", key, transport=transport, **options)

    def method_types(self) -> set[str]:
        return {"supervised", "dpo", "grpo"}

    def _algorithms(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"object": "list", "data": sorted(self.method_types())})

    def routes(self) -> Any:
        return [
            ("GET", r"/health", lambda request: httpx.Response(200, json={"status": "ok"})),
            ("GET", r"/version", lambda request: httpx.Response(200, json={"version": self.version})),
            ("GET", r"/fine_tuning/algorithms", self._algorithms),
            ("GET", r"/engine/status", self._engine_status),
            ("POST", r"/engine/start", self._start_engine),
            ("POST", r"/engine/stop", self._stop_engine),
            *super().routes(),
        ]

    def _engine_status(self, request: httpx.Request) -> httpx.Response:
        if self.status["status"] == "starting":
            self.slow -= 1
            if self.slow <= 0:
                self.status["status"] = "running"
        return httpx.Response(200, json=self.status)

    def _start_engine(self, request: httpx.Request) -> httpx.Response:
        self.engine.append("start")
        self.status["status"] = "starting" if self.slow else "running"
        return httpx.Response(200, json=self.status)

    def _stop_engine(self, request: httpx.Request) -> httpx.Response:
        self.engine.append("stop")
        self.status["status"] = "stopped"
        return httpx.Response(200, json=self.status)

    def _create(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        row = ROWS[body["method"]["type"]]
        for line in self.contents[body["training_file"]].splitlines():
            row.model_validate_json(line)
        if body["metadata"].get("etude_free_engine") == "true":
            self.engine.append("away")
            self.status |= {"status": "stopped", "away_for_jobs": True}
        return super()._create(request)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        response = super()._answer(request)
        over = all(job["status"] in FINAL for job in self.jobs.values())
        if self.status["away_for_jobs"] and self.jobs and over:
            self.engine.append("back")
            self.status |= {"status": "running", "away_for_jobs": False}
        return response

    def _complete(self, request: httpx.Request) -> httpx.Response:
        if self.status["status"] != "running":
            return error_response(503, "the engine is away", "engine_unavailable")
        body = json.loads(request.read())
        response = super()._complete(request)
        if response.status_code != 200 or not body.get("return_token_ids"):
            return response
        reply = response.json()
        (choice,) = reply["choices"]
        ids = [*choice["message"]["content"].encode(), END]
        choice["token_ids"] = ids
        choice["logprobs"] = {"content": [{"token": f"token_id:{one}", "logprob": -0.5} for one in ids]}
        prompt = "".join(str(message["content"]) for message in body["messages"])
        return httpx.Response(200, json=reply | {"prompt_token_ids": [1, *prompt.encode(), 1]})
