"""An API of models and training jobs whose answers are faulty at random places.

One server has many of them, each at a path of its own and with dice of its own. What becomes of a request
depends on the seed, on its content, and on how often it came before.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter

import httpx

from tests.backends.openai_stand_in import StandIn
from tests.faults.remote_faults import FAULTS, SocketServer, reply, sends

_WEIGHTS = {"temporary": 1.0, "slow": 0.2, "refused": 0.2, "impossible": 0.2}
"""By kind: the slow ones cost a timeout each, and those that are refused stop a run."""
_LONG = ("429-1e300", "429-year-99999999999")
"""Faults that ask to be waited for: half a minute goes by where a server trains."""
_ONLY_BEFORE = ("refused", "impossible")
"""Faults that say that nothing was done."""


class FaultyApi:
    """Files, jobs and models for one run, as the tests' stand-in has them, and dice.

    A model's answer depends on what it was asked, and on its version.
    """

    def __init__(self, api: StandIn, share: float, seed: str, kinds: tuple[str, ...]) -> None:
        """A `share` of all requests has a fault of these kinds."""
        self.api, self.share, self.seed = api, share, seed
        self._names = [name for name, fault in FAULTS.items() if fault.kind in kinds]
        self._weights = [0.1 if name in _LONG else _WEIGHTS[FAULTS[name].kind] for name in self._names]
        self.committed: Counter[str] = Counter()
        """Faults by name, with `after` where the request was done and only its answer is lost."""
        self.faults_of: dict[str, list[str]] = {}
        """By the content of model calls."""
        self.paid: Counter[str] = Counter()
        """Model calls that were answered well, by content."""
        self._came: Counter[str] = Counter()

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Do what a request asks for. Later versions of a model say yes more often."""
        content = hashlib.sha256(request.read()).digest()
        self.api.say = lambda model, number: "yes" if content[0] < 100 + 40 * len(self.api.jobs) else "no"
        return self.api.answer(request)

    def fault_of(self, method: str, path: str, body: bytes) -> tuple[str | None, bool]:
        """The fault that a request has, and whether it is done all the same."""
        is_call = path.endswith("/chat/completions")
        content = hashlib.sha256(body).hexdigest() if is_call else ""
        identity = f"{method} {path} {content}"
        self._came[identity] += 1
        dice = random.Random(f"{self.seed} {identity} {self._came[identity]}")
        if dice.random() >= self.share:
            if is_call:
                self.paid[content] += 1
            return None, True
        (name,) = dice.choices(self._names, self._weights)
        is_done = not is_call and FAULTS[name].kind not in _ONLY_BEFORE and dice.random() < 0.5
        self.committed[f"{name} after" if is_done else name] += 1
        if is_call:
            self.faults_of.setdefault(content, []).append(name)
        return name, is_done

    def doubled(self) -> list[str]:
        """Model calls, files and jobs that were paid or made more than once."""
        calls = [f"a call was paid {count} times" for count in self.paid.values() if count > 1]
        files = Counter((file.filename, file.bytes) for file in self.api.files.values())
        jobs = Counter(job["metadata"]["etude_job"] for job in self.api.jobs.values())
        made = [f"{what} was made {count} times" for what, count in (files + jobs).items() if count > 1]
        return calls + made


class FaultyServer(SocketServer):
    """Serves APIs of that kind at `http://127.0.0.1:PORT/NAME/v1`."""

    def __init__(self) -> None:
        super().__init__()
        self._mounted: dict[str, FaultyApi] = {}

    def mount(self, name: str, api: FaultyApi) -> str:
        """Serve an API; its base URL."""
        self._mounted[name] = api
        return f"{self.origin}/{name}/v1"

    async def answer(
        self, method: str, path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter
    ) -> bool:
        """Do what is asked, commit a fault, or both."""
        _, name, path = path.split("/", 2)
        mounted = self._mounted[name]
        fault, is_done = mounted.fault_of(method, path.split("?")[0], body)
        request = httpx.Request(method, f"{self.origin}/{path}", headers=headers, content=body)
        response = mounted.answer(request) if is_done else None
        if fault is None:
            assert response is not None
            await sends(reply(response.status_code, response.content))(writer)
            return True
        await FAULTS[fault].commit(writer)
        return False
