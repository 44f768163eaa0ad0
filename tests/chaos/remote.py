"""Faults of remote models and training servers at random places of runs, and an API that has them."""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import shutil
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml
from anyio.from_thread import start_blocking_portal

from tests.backends.lm_stand_in import LmStandIn
from tests.backends.openai_stand_in import BASE, KEY, StandIn
from tests.chaos.project import NAME, contents, differences, run_path
from tests.chaos.scene import Figures, Scene
from tests.cli.projects import finished, rows
from tests.faults.remote_faults import FAULTS, SocketServer, reply, sends

_FAULTS = (2000, 60)
"""In full, and with `--quick`."""
_SHARE = 0.3
"""Of all requests."""
_AT_ONCE = 3
_ANSWERED = re.compile(r"answered (something else|\d{3})|MalformedAnswer")
"""A fault's words where a training server is told of."""
_MOST_STOPS = 60

AGENT = """
from dataclasses import replace

import etude
from etude.engines import openai_config

# Or each wait of a server that asks for minutes would take half a minute.
openai_config.USUAL = replace(openai_config.USUAL, first_wait=0.001, longest_wait=0.01)


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode) -> str:
    messages, texts = [{"role": "user", "content": example.inputs["question"]}], []
    for _ in range(3):
        reply = await episode.chat(messages)
        texts.append(reply.text)
        messages += [{"role": "assistant", "content": reply.text}, {"role": "user", "content": "and now?"}]
    return " ".join(texts)


@etude.evaluator
def agreeable(example: etude.Example, output: str) -> float:
    return output.split().count("yes") / 3
"""

_QUICK = {"request_timeout": 4, "retry_wait": 0.001}
_POLICY = {
    **{"_type": "openai", "model_name": BASE, "base_url": "${API}", "api_key": "${API_KEY}"},
    **{"max_tokens": 8, "request_timeout": 4},
}
_EVALUATION: Mapping[str, Any] = {
    "llms": {"policy": _POLICY},
    "workflow": "agent:play",
    "eval": {
        "general": {"dataset": "train.jsonl", "max_concurrency": 8},
        "evaluators": {"agreeable": "agent:agreeable"},
    },
    "finetuning": {"error_budget": 0.0},
}
_TRAINING: Mapping[str, Any] = {
    **_EVALUATION,
    "trainers": {"epochs": {"_type": "epochs", "poll_interval": 0.001}},
    "finetuning": {
        "enabled": True,
        "num_epochs": 2,
        "error_budget": 0.0,
        "run_configuration": {"validation_dataset": "validation.jsonl"},
    },
}


@dataclass(frozen=True)
class Kind:
    """A kind of run."""

    name: str
    config: Mapping[str, Any]
    api: type[StandIn]

    @property
    def command(self) -> tuple[str, ...]:
        """The command that begins it."""
        return ("train" if "trainers" in self.config else "evaluate", "config.yml", "--name", NAME, "--json")


KINDS = (
    Kind("an evaluation", _EVALUATION, StandIn),
    Kind(
        "training at OpenAI",
        {
            **_TRAINING,
            "trajectory_builders": {
                "good": {"_type": "expert_iteration", "num_generations": 2, "min_reward": 0.3}
            },
            "trainer_adapters": {"openai": {"_type": "openai", "min_rows": 1, **_QUICK}},
        },
        StandIn,
    ),
    Kind(
        "training at a server",
        {
            **_TRAINING,
            "llms": {"policy": {**_POLICY, "provider": "etude"}},
            "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 2}},
            "trainer_adapters": {"server": {"_type": "lm_server", **_QUICK}},
        },
        LmStandIn,
    ),
)


@dataclass
class Ends:
    """The ends of runs."""

    runs: int = 0
    stops: int = 0
    """Times that one stopped with the cause, and was resumed."""
    committed: Counter[str] = field(default_factory=Counter)
    doubled: list[str] = field(default_factory=list)
    unequal: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def remote(scene: Scene) -> Figures:
    """Runs of all kinds, one after another, until there were so many faults."""
    wanted, ends = _FAULTS[scene.quick], Ends()
    scene.note(f"{wanted} faults of remote models and training servers")
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(FaultyServer().serving()) as server,
    ):
        played = _Played(scene, server, ends)
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            number = 0
            while ends.committed.total() < wanted:
                numbers = range(number, number + _AT_ONCE)
                list(pool.map(lambda each: played.run(KINDS[each % len(KINDS)], each), numbers))
                number += _AT_ONCE
                scene.note(f"{ends.committed.total()} faults in {ends.runs} runs, {ends.stops} stops")
    return {
        "faults": ends.committed.total(),
        "kinds": len(ends.committed),
        "runs": ends.runs,
        "stops": ends.stops,
        "doubled": len(ends.doubled),
        "unequal_ends": len(ends.unequal),
        "silent": len(ends.unequal),
        "problems": [*ends.unequal, *ends.doubled, *ends.problems],
        "committed": dict(sorted(ends.committed.items())),
    }


class _Played:
    """Runs at a faulty server, each compared with one of its kind without faults."""

    def __init__(self, scene: Scene, server: FaultyServer, ends: Ends) -> None:
        self._scene, self._server, self._ends = scene, server, ends
        self._expected = {kind.name: self._undisturbed(kind) for kind in KINDS}

    def _undisturbed(self, kind: Kind) -> dict[str, Any]:
        place = f"well-{KINDS.index(kind)}"
        folder, environment = self._project(kind, place, FaultyApi(kind.api(), 0.0, "", ("temporary",)))
        done = finished(*kind.command, folder=folder, environment=environment)
        if done.returncode != 0:
            raise SystemExit(f"{kind.name} that nobody disturbs fails: {done.stderr[-2000:]}")
        return dict(_kept(folder))

    def run(self, kind: Kind, number: int) -> None:
        """One run, resumed after each stop."""
        place = f"{kind.name}, run {number}"
        api = FaultyApi(kind.api(), _SHARE, f"{self._scene.seed} {number}", ("temporary", "slow", "refused"))
        folder, environment = self._project(kind, str(number), api)
        command = kind.command
        for _ in range(_MOST_STOPS):
            done = finished(*command, folder=folder, environment=environment)
            if done.returncode == 0:
                break
            self._ends.stops += 1
            if problem := _stop_problem(done.returncode, done.stderr):
                self._ends.problems.append(f"{place}: {problem}")
            begun = (run_path(folder) / "run.db").exists()
            command = ("resume", NAME, "--retry-failed", "--json") if begun else kind.command
        else:
            self._ends.problems.append(
                f"{place}: it is not over after {_MOST_STOPS} stops: {done.stderr[-300:]}"
            )
        self._ends.runs += 1
        self._ends.committed += api.committed
        self._ends.doubled += [f"{place}: {each}" for each in api.doubled()]
        if done.returncode == 0 and (found := differences(self._expected[kind.name], _kept(folder))):
            self._ends.unequal.append(f"{place}: {'; '.join(found[:3])}")
        shutil.rmtree(folder)

    def _project(self, kind: Kind, name: str, api: FaultyApi) -> tuple[Path, dict[str, str]]:
        folder = self._scene.folder / f"remote-{name}"
        folder.mkdir()
        (folder / "agent.py").write_text(AGENT)
        (folder / "train.jsonl").write_text(rows(16, "t"))
        (folder / "validation.jsonl").write_text(rows(4, "v"))
        (folder / "config.yml").write_text(yaml.safe_dump(dict(kind.config)))
        return folder, {"API": self._server.mount(name, api), "API_KEY": KEY}


def _kept(folder: Path) -> dict[str, Any]:
    """All that the run's journal has, but for the figures that an API may not have given."""
    return dict(_without_metrics(contents(folder)))


def _without_metrics(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_metrics(each) for key, each in value.items() if key != "metrics"}
    return [_without_metrics(each) for each in value] if isinstance(value, list) else value


def _stop_problem(code: int, errors: str) -> str | None:
    """The fault in how a run stopped; None where it said why."""
    if code != 1 or "Traceback" in errors:
        return f"it ended with {code}: {errors[-600:]}"
    if not errors.strip():
        return "it stopped and said nothing"
    if not any(fault.words in errors for fault in FAULTS.values()) and not _ANSWERED.search(errors):
        return f"it stopped without the cause: {errors[-600:]}"
    return None


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

    def choose_fault(self, method: str, path: str, body: bytes) -> tuple[str | None, bool]:
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
        fault, is_done = mounted.choose_fault(method, path.split("?")[0], body)
        request = httpx.Request(method, f"{self.origin}/{path}", headers=headers, content=body)
        response = mounted.answer(request) if is_done else None
        if fault is None:
            assert response is not None
            await sends(reply(response.status_code, response.content))(writer)
            return True
        await FAULTS[fault].commit(writer)
        return False
