"""An endpoint that charges: every answer says what it took, and the endpoint keeps the sum."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from typing import Any

from tests.json_server import JsonServer


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
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": prompt // 2},
        }
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        return {"model": body["model"], "choices": [] if is_spoilt else [choice], "usage": usage}
