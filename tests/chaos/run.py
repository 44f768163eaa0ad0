"""The short run that is harmed: two models in deterministic mode, and the API that it pays."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from etude.models.tiny import build_policy, build_tokenizer
from tests.backends.openai_stand_in import BASE, KEY, StandIn
from tests.chaos.acknowledged import is_answered, lost_entries
from tests.chaos.project import AGENT, NAME, differences, run_path
from tests.cli.killed import everything, repeatable_project
from tests.cli.projects import change, rows
from tests.forked import Forked
from tests.support import without_times

TRAIN = ("train", "config.yml", "--name", NAME, "-o", "storage=null", "--json")
RESUME = ("resume", NAME, "--json")

_LOGS = ("local_jobs.jsonl", "openai_jobs.jsonl", "trajectory_builder.jsonl")


@dataclass
class Outcome:
    """The ends of the runs that were harmed."""

    harmed: int = 0
    unequal: list[str] = field(default_factory=list)
    """Runs that ended well and are not as the one that nobody disturbed, each with its first differences."""
    lost: list[str] = field(default_factory=list)
    """Entries that were acknowledged and were not there any more."""
    doubled: list[str] = field(default_factory=list)
    """Calls, files and jobs that were paid twice."""
    refused: int = 0
    """Runs that were not resumed, with an error that says so."""
    recovered: int = 0
    """Runs that went back to a version that was whole, said so, and ended as they should."""
    failures: list[str] = field(default_factory=list)
    """Runs that should have gone on and did not."""

    @property
    def problems(self) -> list[str]:
        """All that is not as it has to be."""
        return [*self.lost, *self.doubled, *self.unequal, *self.failures]

    def figures(self, harm: str) -> dict[str, Any]:
        """As the parts have them; `harm` is the name of how many runs were harmed."""
        return {
            harm: self.harmed,
            "lost": len(self.lost),
            "doubled": len(self.doubled),
            "unequal_ends": len(self.unequal),
            "problems": self.problems,
        }


class ShortRun:
    """The project, the API that it pays, and what its run keeps when nobody disturbs it."""

    def __init__(self, folder: Path) -> None:
        self.paid = Paid()
        self.folder = _project(folder)
        self.paid.journal = self.path / "run.db"
        self.acknowledged = folder / "acknowledged"
        """The log of what victims' journals said was stored."""
        self.operations = folder / "operations"
        """Has a byte for each file operation that the last victim came to."""
        with self.attended():
            code, errors = self.victim(0, *TRAIN)
            if code:
                raise SystemExit(f"the run that nobody disturbs fails: {errors[-2000:]}")
            self.expected = self.kept()
            self.jobs = len(self.paid.jobs)
            self.clear()

    @property
    def path(self) -> Path:
        """The run folder."""
        return run_path(self.folder)

    @contextmanager
    def attended(self) -> Iterator[None]:
        """While the API listens."""
        before = {name: os.environ.get(name) for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL")}
        with self.paid.serve() as url:
            os.environ |= {"OPENAI_API_KEY": KEY, "OPENAI_BASE_URL": url, "OMP_NUM_THREADS": "1"}
            yield
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})

    def clear(self) -> None:
        """Begin anew, with an API that has seen nothing."""
        shutil.rmtree(self.folder / "runs", ignore_errors=True)
        self.acknowledged.unlink(missing_ok=True)
        self.paid.clear()

    def begun(self, number: int, *arguments: str) -> Forked:
        """A command that is killed at one of its file operations, at none for 0, and logs what is stored."""
        script = str(Path(__file__).with_name("victim.py"))
        files = (self.folder / "runs", str(number), self.operations, self.acknowledged)
        words = [script, *map(str, files), *arguments]
        return Forked(words, self.folder, {**os.environ}, program="python")

    def victim(self, number: int, *arguments: str) -> tuple[int, str]:
        """Such a command run to its end: exit code and errors."""
        process = self.begun(number, *arguments)
        _, errors = process.communicate(timeout=120)
        return process.wait(), errors

    @property
    def command(self) -> Sequence[str]:
        """How the run is resumed, or begun."""
        is_there = (self.path / "config.yml").exists() and (self.path / "run.db").exists()
        return RESUME if is_there else TRAIN

    def go_on(self, outcome: Outcome, what: str) -> None:
        """Look for what is lost, go on with the run, and compare its end; problems go to the outcome."""
        outcome.lost += [f"{what}: {each}" for each in lost_entries(self.acknowledged, self.path / "run.db")]
        code, errors = self.victim(0, *self.command)
        if code:
            outcome.failures.append(f"{what}: {errors[-500:]}")
            return
        outcome.doubled += [f"{what}: {each}" for each in self.twice()]
        if recovered := self.recoveries():
            outcome.lost += [f"{what}: {each}" for each in recovered]
        elif found := self.differences():
            outcome.unequal.append(f"{what}: {'; '.join(found[:3])}")

    def twice(self) -> list[str]:
        """The calls, files and jobs that were paid for twice."""
        more = [f"{len(self.paid.jobs)} jobs in place of {self.jobs}"] * (len(self.paid.jobs) > self.jobs)
        more += [f"{len(self.paid.files)} files in place of {self.jobs}"] * (len(self.paid.files) > self.jobs)
        return [*self.paid.doubled, *more]

    def recoveries(self) -> list[str]:
        """The times that the run went back from damaged weights, as its journal has them."""
        kept = everything(self.path).items()
        return [f"{key}: {value['damage']}" for key, value in kept if "/recovery/" in key]

    def differences(self) -> list[str]:
        """The steps and files in which the run is not as it should be, without that it went back."""
        return differences(self.expected, self.kept())

    def kept(self) -> dict[str, Any]:
        """All that the run keeps, without that it went back: steps of its journal, and files."""
        return {
            **{key: value for key, value in everything(self.path).items() if "/recovery/" not in key},
            **{name: content for name, content in _list_files(self.path) if ".set-aside-" not in name},
        }


def _list_files(run: Path) -> Iterator[tuple[str, Any]]:
    """Names of files, with the digest of weights, and with metrics but for what is different each time.

    Not the logs of what single processes did, whose last lines a kill may cost.
    """
    for path in sorted(run.rglob("*")):
        name, content = str(path.relative_to(run)), None
        if path.name in _LOGS:
            continue
        if path.suffix == ".safetensors":
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.name == "training_metrics.jsonl":
            content = [without_times(json.loads(line)) for line in path.read_text().splitlines()]
        yield name, content


def _project(folder: Path) -> Path:
    base = folder / "base"
    build_policy(build_tokenizer(["t0?", "v0?", "0123456789"], splits=["[0-9]"]), 0).export(base)
    project = repeatable_project(folder / "project", base)
    (project / "agent.py").write_text(AGENT)
    (project / "validation.jsonl").write_text(rows(2, "v"))
    collected = {"num_generations": 2, "examples_per_epoch": 4}
    change(
        project / "config.yml",
        llms__helper={"_type": "openai", "model_name": BASE, "max_tokens": 8},
        eval__general__max_concurrency=4,
        trajectory_builders__grpo={"_type": "grpo"} | collected,
        trajectory_builders__all={"_type": "expert_iteration"} | collected,
        trainer_adapters__openai={"_type": "openai", "min_rows": 2},
        trainers={"epochs": {"_type": "epochs", "poll_interval": 0.001}},
        finetuning__num_epochs=2,
        finetuning__run_configuration__validation_interval=2,
        finetuning__targets={
            "policy": {"trajectory_builder": "grpo", "trainer_adapter": "local"},
            "helper": {"trajectory_builder": "all", "trainer_adapter": "openai"},
        },
    )
    return project


class Paid(StandIn):
    """Answers follow from requests alone, so that every run gets the same; what is made has its time.

    Outlives the run, as the API does: a killed run finds there what was made.
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
