"""The API that the harmed run pays: a stand-in with calls, files and training jobs."""

from __future__ import annotations

import copy
import hashlib
import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from tests.backends.openai_stand_in import StandIn

_SEED_SHIFT = 32
"""Of a call's key, as it is sent as the request's seed."""


class Paid(StandIn):
    """Answers follow from requests alone, so that every run gets the same; what is made has its time.

    Outlives the run, as the API does: whoever is killed finds there what was made.
    """

    def __init__(self) -> None:
        super().__init__(min_rows=2)
        self.journal = Path()
        """Of the run that asks."""
        self.doubled: list[str] = []
        """Requests whose answer the journal had when they came, in words."""
        self._made: dict[str, float] = {}

    def clear(self) -> None:
        """Forget files and jobs, as before the first run."""
        self.go_back(0.0)
        self.doubled.clear()

    def go_back(self, to: float) -> None:
        """Be as at a time, in Unix seconds; jobs that were made before it have gone on since then."""
        for name in [name for name, made in self._made.items() if made > to]:
            for kept in (self.files, self.contents, self.jobs, self._made):
                kept.pop(name, None)

    def state(self) -> tuple[Any, ...]:
        """All that was made so far."""
        return copy.deepcopy((self.files, self.contents, self.jobs, self._made))

    def go_back_to(self, state: tuple[Any, ...]) -> None:
        """Be as when that was the state."""
        self.files, self.contents, self.jobs, self._made = copy.deepcopy(state)
        self.doubled.clear()

    def _route(self, request: httpx.Request, path: str) -> httpx.Response:
        response = super()._route(request, path)
        for name in (*self.files, *self.jobs):
            self._made.setdefault(name, time.time())
        return response

    def _complete(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        if _is_answered(self.journal, body["seed"]):
            self.doubled.append(f"the call with seed {body['seed']}, whose answer the journal had")
        said = hashlib.sha256(
            json.dumps([body["model"], body["messages"], body["seed"]]).encode()
        ).hexdigest()
        reply = super()._complete(request).json()
        reply |= {"id": "chatcmpl-paid", "created": 0}
        reply["choices"][0]["message"]["content"] = f"{int(said[:8], 16) % 1000}"
        return httpx.Response(200, json=reply)


def _is_answered(journal: Path, seed: int) -> bool:
    if not journal.exists():
        return False
    query = "SELECT value FROM steps WHERE key LIKE '%/call/%'"
    try:
        with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True, timeout=10)) as connection:
            calls: list[dict[str, Any]] = [json.loads(text) for (text,) in connection.execute(query)]
    except sqlite3.OperationalError:  # The run is making its tables at this moment.
        return False
    return any(
        call.get("completion") and call["model"] == "helper" and call["key"] >> _SEED_SHIFT == seed
        for call in calls
    )
