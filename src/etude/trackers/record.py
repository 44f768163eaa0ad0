"""The seam of trackers: what they are given of a run, read from its journal, and the methods that one has.

A tracker never sees the run itself. All that it gets was read from the journal, so that nothing is lost while
it is away, and a tracker of one's own has the same guarantees as those that ship.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import Field

from etude.budget.bill import Bill, Line, bill_of, total
from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.import_path import import_object
from etude.config.registry import made_by, register_tracker
from etude.core.errors import EtudeError, MissingExtraError, RequestError, first_line
from etude.core.history import Entry, EpochEntry, History, ValidationEntry, WarmUpEntry
from etude.store.facts import SUMMARY
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from etude.store.stored_config import RESULT

State: TypeAlias = Literal["finished", "failed", "stopped"]
"""How a process ended its part of a run. `stopped`: it may be resumed."""

SECONDS_TO_ANSWER = 10.0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One thing that has happened in a run, once and for all."""

    key: str
    """The same for the same record, whenever it is read."""
    kind: Literal["warm_up", "validation", "epoch", "evaluation", "finished"]
    step: int
    """Epochs that were over with it."""
    at: float
    """When it happened; Unix seconds."""
    metrics: Mapping[str, float]
    """By names such as `train/avg_reward`, `learner/loss`, `validation/reward_low`."""
    target: str | None = None
    """Of several models the one that it is about."""
    alarms: tuple[str, ...] = ()
    """The alarms that ring in it, a sentence each."""
    number: int = 0
    """How many other records the tracker was sent before."""

    def logged(self, api: Any) -> dict[str, Any]:
        """The record as W&B's API, or one like it, logs it: its metrics, and a table of the alarms."""
        data: dict[str, Any] = {**self.metrics}
        if self.alarms:
            data["alarms"] = api.Table(columns=["alarm"], data=[[text] for text in self.alarms])
        return data


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows."""

    name: str
    folder: Path
    token: str
    """A word of letters and digits for this run at this tracker, kept in the journal: a resumed run has it
    again, and no other run has it."""
    config: Mapping[str, Any]
    """The config as the run folder has it, without secrets."""
    environment: Mapping[str, Any]
    """Versions of Python, Etude and all packages, the machine, and the `git` commit."""

    @property
    def unique_name(self) -> str:
        """A name of letters, digits, `.`, `_` and `-` that no other run has, as `one-4f2c1a`."""
        return re.sub(r"[^\w.-]", "-", f"{self.name}-{self.token[:6]}", flags=re.ASCII)

    @property
    def flat_config(self) -> dict[str, str]:
        """The config as texts by dotted names: `{"llms.policy.model": "Qwen/Qwen3-0.6B"}`."""
        return _flattened(self.config)

    @property
    def code(self) -> dict[str, str]:
        """The code that it was made with: `etude`, `python`, and the `git` commit of the user's folder."""
        known = self.environment
        versions = {name: str(known[name]) for name in ("etude", "python") if known.get(name)}
        if git := known.get("git"):
            versions["git"] = str(git["commit"]) + (", with changes" if git["dirty"] else "")
        return versions


class Tracker(Protocol):
    """Shows a run elsewhere. All methods are called from one thread, and may wait and raise.

    After one has raised, `open` is called again some time later, and then `send` with the same record. Each
    record is sent at least once: again, with the same `key` and `number`, where the process was killed before
    the journal had it that the record was sent.
    """

    def open(self, run: TrackedRun) -> str:
        """Begin to show a run, or go on with what `run.token` was shown under before.

        Gives where it can be looked at, in a few words or as an address; empty for nowhere.
        """

    def send(self, record: RunRecord) -> None:
        """Show a record. When this has returned it counts as shown."""

    def close(self, state: State) -> None:
        """The process that shows the run ends; it may be opened again by another one."""


def require_package(module: str, extra: str) -> None:
    """Raise MissingExtraError where a module is not installed."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise MissingExtraError(f"the tracker '{extra}'", extra)


def require_server(url: str) -> None:
    """Raise EtudeError where nobody answers at an address of HTTP: packages would try for minutes."""
    import httpx  # Only here: most runs have no such tracker.

    try:
        httpx.head(url, timeout=SECONDS_TO_ANSWER, verify=False)  # Nothing is sent, and nothing believed.
    except httpx.TransportError as error:
        raise EtudeError(f"nobody answers at {url}: {first_line(error)}") from error


def _flattened(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    texts: dict[str, str] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            texts |= _flattened(value, f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            texts |= _flattened({str(index): item for index, item in enumerate(value)}, f"{name}.")
        elif value is not None:
            texts[name] = str(value)
    return texts


_LEFT_OUT = {"target", "training", "model_versions", "failure_causes"}
"""Metrics that are no figures of an epoch, or have names without end."""


def record_keys(run: RunFolder) -> list[str]:
    """The keys of all records that there are by now, in the order in which they are shown."""
    return [key for key, _, _ in _Reader(run).places()]


def new_records(run: RunFolder, sent: Collection[str]) -> Iterator[RunRecord]:
    """The records that were not sent. Raises StoreError."""
    reader = _Reader(run)
    for key, target, entry in reader.places():
        if key not in sent:
            yield reader.record(key, target, entry)


def _key(kind: str, epoch: int, target: str | None) -> str:
    return f"{kind}/{epoch:08d}" + ("" if target is None else f"/{target}")


class _Reader:
    def __init__(self, run: RunFolder) -> None:
        self._run = run
        # Before the histories, which are whole where these are there.
        self._ends = [name for name in (RESULT, SUMMARY) if run.read_json(name) is not None]
        self.histories: Mapping[str | None, History] = histories(run.journal, run.name)

    def places(self) -> Iterator[tuple[str, str | None, Entry | WarmUpEntry | None]]:
        """Of each record the key, the model that it is about where there are several, and its entry."""
        entries: list[tuple[tuple[int, bool, int], str | None, Entry]] = []
        for number, (target, history) in enumerate(self.histories.items()):
            if history.warm_up is not None:
                yield _key("warm_up", 0, target), target, history.warm_up
            for entry in history.entries:
                entries.append(((entry.epoch, isinstance(entry, ValidationEntry), number), target, entry))
        for (epoch, is_validation, _), target, entry in sorted(entries, key=lambda each: each[0]):
            yield _key("validation" if is_validation else "epoch", epoch, target), target, entry
        if RESULT in self._ends:
            yield "evaluation", None, None
        if SUMMARY in self._ends:
            yield _key("finished", self._epochs, None), None, None

    @property
    def _epochs(self) -> int:
        return max((len(history.epochs) for history in self.histories.values()), default=0)

    def record(self, key: str, target: str | None, entry: Entry | WarmUpEntry | None) -> RunRecord:
        """The record of a place."""
        prefix = "" if target is None else f"{target}/"
        if entry is None and key == "evaluation":
            metrics = figures(self._run.read_json(RESULT) or {}, "evaluation/")
            ended = (self._run.path / RESULT).stat().st_mtime
            return RunRecord(key, "evaluation", 0, ended, metrics)
        if entry is None:
            metrics = {f"total/{name}": value for name, value in _spent(self._bill.total).items()}
            metrics["total/hours"] = self._bill.seconds / 3600
            ended = (self._run.path / SUMMARY).stat().st_mtime
            return RunRecord(key, "finished", self._epochs, ended, metrics)
        at = datetime.fromisoformat(entry.timestamp).timestamp()
        if isinstance(entry, WarmUpEntry):
            about = {**entry.metrics, "steps": entry.steps, "seconds": entry.seconds}
            return RunRecord(key, "warm_up", 0, at, figures(about, f"{prefix}warm_up/"), target)
        kind: Literal["epoch", "validation"] = "epoch" if isinstance(entry, EpochEntry) else "validation"
        return RunRecord(
            key=key,
            kind=kind,
            step=entry.epoch,
            at=at,
            metrics=self._of_epoch(entry, prefix, target)
            if isinstance(entry, EpochEntry)
            else figures(entry.metrics, f"{prefix}validation/"),
            target=target,
            alarms=tuple(event.text for event in entry.alarms if event.is_new),
        )

    @cached_property
    def _bill(self) -> Bill:
        """All that the run has taken, read once."""
        return bill_of(self._run.journal)

    def _of_epoch(self, entry: EpochEntry, prefix: str, target: str | None) -> dict[str, float]:
        metrics = figures(entry.metrics, f"{prefix}train/")
        metrics |= figures(entry.metrics.get("training") or {}, f"{prefix}learner/")
        tokens, seconds = (entry.metrics.get(key) for key in ("completion_tokens", "collecting_seconds"))
        if tokens and seconds:
            metrics[f"{prefix}train/tokens_per_second"] = tokens / seconds
        phase = re.compile(rf"train/{entry.epoch}(?!\d)")
        # What the episodes of several models' epochs took is theirs together.
        if target is None or target == next(iter(self.histories)):
            lines = [line for line in self._bill.lines if phase.match(line.phase)]
            metrics |= {f"cost/{name}": value for name, value in _spent(total(lines)).items()}
        if entry.status is not None:
            job = [line for line in self._bill.lines if line.phase == entry.status.run_id]
            metrics |= {f"{prefix}learner/cost_{name}": value for name, value in _spent(total(job)).items()}
        return metrics


def figures(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """All numbers in metrics, by their path; what is no number has no place in a plot."""
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, bool) or name in _LEFT_OUT:
            continue
        if isinstance(value, int | float):
            numbers[f"{prefix}{name}"] = float(value)
        elif isinstance(value, Mapping):
            numbers |= figures(value, f"{prefix}{name}/")
    return numbers


def _spent(line: Line) -> dict[str, float]:
    return {"usd": line.usd, "tokens": float(line.tokens)} if line.tokens else {}


class FunctionTrackerConfig(TrackerConfig, name="function"):
    """A function of yours that is called with each record of the run, or an `etude.Tracker` of yours."""

    function: str
    """Its import path, `module:name`."""

    def destination(self) -> str:
        return self.function


class LiveTrackerConfig(TrackerConfig, name="live"):
    """A function that a program gave as a Python object."""

    name: str
    """The name of the function."""
    value: Any = Field(default=None, exclude=True, repr=False)

    def destination(self) -> str:
        return self.name


class FunctionTracker:
    """Calls a function, plain or async, with each record."""

    def __init__(self, function: Callable[[RunRecord], Any]) -> None:
        self._function = function

    def open(self, run: TrackedRun) -> str:
        """There is nothing to begin."""
        return ""

    def send(self, record: RunRecord) -> None:
        """Call the function."""
        result = self._function(record)
        if inspect.iscoroutine(result):
            asyncio.run(result)

    def close(self, state: State) -> None:
        """There is nothing to end."""


def as_tracker(value: Any) -> Tracker:
    """A function, or an object with the methods of a tracker, or a class of such, as a tracker.

    Raises RequestError for anything else.
    """
    if isinstance(value, type):
        value = value()
    if all(callable(getattr(value, name, None)) for name in ("open", "send", "close")):
        tracker: Tracker = value
        return tracker
    if not callable(value):
        raise RequestError(f"a tracker is a function of a record, or has open, send and close: {value!r:.80}")
    return FunctionTracker(value)


def live_tracker_config(value: Any) -> LiveTrackerConfig:
    """The config of a tracker that a program gives. Raises RequestError for what is none."""
    as_tracker(value)
    return LiveTrackerConfig(name=getattr(value, "__name__", type(value).__name__), value=value)


register_tracker(config_type=FunctionTrackerConfig)(
    made_by(lambda config: as_tracker(import_object(config.function)))
)


@register_tracker(config_type=LiveTrackerConfig)
async def live_tracker(config: LiveTrackerConfig, builder: Builder) -> AsyncIterator[Tracker]:
    """The function; where its program is not running, what says so as soon as it is needed."""

    def missing(record: RunRecord) -> None:
        run = "run" if builder.run is None else str(builder.run.path)
        raise RequestError(
            f"the run was started by a program with its own function '{config.name}', which is not in the "
            f"config; give it again, in Python: etude.resume({run!r}, report=…)"
        )

    yield as_tracker(missing if config.value is None else config.value)
