"""The API that the harmed run pays: a stand-in with calls, files and training jobs."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx

from tests.backends.openai_stand_in import StandIn
from tests.chaos.acknowledged import is_answered


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

    def clear(self) -> None:
        """Forget files and jobs, as before the first run."""
        self.go_back_to(({}, {}, {}))

    def state(self) -> tuple[Any, ...]:
        """All that was made so far."""
        return copy.deepcopy((self.files, self.contents, self.jobs))

    def go_back_to(self, state: tuple[Any, ...]) -> None:
        """Be as when that was the state."""
        self.files, self.contents, self.jobs = copy.deepcopy(state)
        self.doubled.clear()

    def _complete(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.read())
        if is_answered(self.journal, body["seed"]):
            self.doubled.append(f"the call with seed {body['seed']}, whose answer the journal had")
        said = hashlib.sha256(
            json.dumps([body["model"], body["messages"], body["seed"]]).encode()
        ).hexdigest()
        reply = super()._complete(request).json()
        reply |= {"id": "chatcmpl-paid", "created": 0}
        reply["choices"][0]["message"]["content"] = f"{int(said[:8], 16) % 1000}"
        return httpx.Response(200, json=reply)
