"""A project whose models are behind an endpoint that charges, and keeps the sum."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from pathlib import Path
from typing import Any

import yaml

from tests.cli.projects import AGENT, rows
from tests.json_server import JsonServer, chat_completion

PROMPT, CACHED, COMPLETION = 2.0, 0.5, 8.0
"""USD for a million tokens of the policy; the judge costs ten times as much."""


def charged_project(
    folder: Path, url: str, *, judge_url: str = "", examples: int = 40, **changes: Any
) -> Path:
    """The path of its config, of which `changes` are keys. The judge is at `judge_url`, or there too."""

    def model(name: str, factor: float, url: str) -> dict[str, Any]:
        prices = {"prompt": PROMPT * factor, "cached": CACHED * factor, "completion": COMPLETION * factor}
        settings = {"max_tokens": 50, "max_retries": 2}
        return {"_type": "openai", "model_name": name, "base_url": url, "prices": prices, **settings}

    config: dict[str, Any] = {
        "llms": {"policy": model("policy", 1, url), "judge": model("judge", 10, judge_url or url)},
        "workflow": "agent:play",
        "eval": {
            "general": {"dataset": "train.jsonl", "max_concurrency": 16},
            "evaluators": {
                "correct": "agent:correct",
                "judged": {"_type": "llm_judge", "model": "judge", "prompt": "Good?"},
            },
        },
        "finetuning": {"target_model": "policy"},
        **changes,
    }
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.jsonl").write_text(rows(examples, "t"))
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def bill_in(run: Path) -> dict[str, Any]:
    """The bill as `etude runs show --json` has it, read by another process's means."""
    from etude.engines.bill import read_bill

    return json.loads(json.dumps(read_bill(run).as_json()))


class ChargingEndpoint(JsonServer):
    """It charges before it answers, as providers do."""

    def __init__(self, *, most: float = math.inf, spoilt: int = 0, together: int = 1) -> None:
        """The first answers are given `together`, and so many at `most` before `go` is set. Every `spoilt`-th
        one is charged and cannot be used."""
        self.go = threading.Event()
        self.calls = self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.most_at_once = 0
        self._at_once = 0
        self._most, self._spoilt = most, spoilt
        self._together = threading.Barrier(together)
        self._first = together
        self._lock = threading.Lock()
        super().__init__(lambda path, headers, body: (200, self.charge(json.loads(body))))

    def usd(self, prompt: float, cached: float, completion: float) -> float:
        """The sum of what it has charged, at these prices for a million tokens."""
        fresh = self.prompt_tokens - self.cached_tokens
        return (fresh * prompt + self.cached_tokens * cached + self.completion_tokens * completion) / 1e6

    def charge(self, body: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(body["messages"])
        prompt = len(text) // 4
        draw = hashlib.blake2b(f"{text}{body.get('seed')}".encode()).digest()
        completion = 1 + draw[0] * body["max_tokens"] // 256
        with self._lock:
            self.calls += 1
            self.prompt_tokens += prompt
            self.cached_tokens += prompt // 2
            self.completion_tokens += completion
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            is_spoilt = bool(self._spoilt) and self.calls % self._spoilt == 0
            is_first, is_held = self.calls <= self._first, self.calls > self._most
        if is_first:
            self._together.wait(60)
        if is_held:
            self.go.wait()
        with self._lock:
            self._at_once -= 1
        content = "yes" if "judge" not in body["model"] else '{"reasoning": "so", "score": 5}'
        answer = chat_completion(body["model"], content, prompt, completion)
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": prompt // 2}
        return answer | {"choices": []} if is_spoilt else answer
