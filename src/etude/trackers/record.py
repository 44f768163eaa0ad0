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
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from pydantic import Field

from etude.budget.bill import Bill, Line, bill_of, total
from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.document import leaves
from etude.config.import_path import import_object
from etude.config.registry import made_by, register_tracker
from etude.core.errors import EtudeError, MissingExtraError, RequestError, first_line
from etude.core.history import EpochEntry, moment
from etude.store.facts import SUMMARY
from etude.store.log import histories
from etude.store.run_folder import RunFolder
from etude.store.stored_config import RESULT

Kind: TypeAlias = Literal["warm_up", "validation", "epoch", "evaluation", "finished"]
State: TypeAlias = Literal["finished", "failed", "stopped"]
"""How a process ended its part of a run. `stopped`: it may be resumed."""

SECONDS_TO_ANSWER = 10.0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One thing that has happened in a run, once and for all."""

    key: str
    """The same for the same record, whenever it is read."""
    kind: Kind
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


def records_of(run: RunFolder, sent: Collection[str] = ()) -> Iterator[RunRecord]:
    """All that has happened in a run by now, in order, without what was sent. Raises StoreError."""
    # Before the histories, which are whole where these are there.
    result, is_over = run.read_json(RESULT), run.read_json(SUMMARY) is not None
    by_target, bill = histories(run.journal, run.name), bill_of(run.journal)
    for target, history in by_target.items():
        key, prefix = _key("warm_up", 0, target), _prefix(target)
        if (entry := history.warm_up) is not None and key not in sent:
            about = {**entry.metrics, "steps": entry.steps, "seconds": entry.seconds}
            at = datetime.fromisoformat(entry.timestamp).timestamp()
            yield RunRecord(key, "warm_up", 0, at, figures(about, f"{prefix}warm_up/"), target)
    entries = [(target, entry) for target, history in by_target.items() for entry in history.entries]
    for target, each in sorted(entries, key=lambda pair: moment(pair[1])):
        if (key := _key(each.kind, each.epoch, target)) not in sent:
            yield RunRecord(
                key=key,
                kind=each.kind,
                step=each.epoch,
                at=datetime.fromisoformat(each.timestamp).timestamp(),
                metrics=_of_epoch(each, _prefix(target), bill, target == next(iter(by_target)))
                if isinstance(each, EpochEntry)
                else figures(each.metrics, f"{_prefix(target)}validation/"),
                target=target,
                alarms=tuple(event.text for event in each.alarms if event.is_new),
            )
    if result is not None and "evaluation" not in sent:
        ended = (run.path / RESULT).stat().st_mtime
        yield RunRecord("evaluation", "evaluation", 0, ended, figures(result, "evaluation/"))
    step = max(len(history.epochs) for history in by_target.values())
    if is_over and (key := _key("finished", step, None)) not in sent:
        metrics = {f"total/{name}": value for name, value in _spent(bill.total).items()}
        metrics["total/hours"] = bill.seconds / 3600
        yield RunRecord(key, "finished", step, (run.path / SUMMARY).stat().st_mtime, metrics)


def _key(kind: str, epoch: int, target: str | None) -> str:
    return f"{kind}/{epoch:08d}" + ("" if target is None else f"/{target}")


def _prefix(target: str | None) -> str:
    return "" if target is None else f"{target}/"


def _of_epoch(entry: EpochEntry, prefix: str, bill: Bill, has_episodes: bool) -> dict[str, float]:
    metrics = figures(entry.metrics, f"{prefix}train/")
    metrics |= figures(entry.metrics.get("training") or {}, f"{prefix}learner/")
    tokens, seconds = (entry.metrics.get(key) for key in ("completion_tokens", "collecting_seconds"))
    if tokens and seconds:
        metrics[f"{prefix}train/tokens_per_second"] = tokens / seconds
    if has_episodes:
        # What those of several models took is theirs together, and told with the first one.
        phase = re.compile(rf"train/{entry.epoch}(?!\d)")
        lines = [line for line in bill.lines if phase.match(line.phase)]
        metrics |= {f"cost/{name}": value for name, value in _spent(total(lines)).items()}
    if entry.status is not None:
        job = [line for line in bill.lines if line.phase == entry.status.run_id]
        metrics |= {f"{prefix}learner/cost_{name}": value for name, value in _spent(total(job)).items()}
    return metrics


def figures(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """All numbers in metrics, by their path; what is no number has no place in a plot."""
    return {
        f"{prefix}{'/'.join(map(str, path))}": float(value)
        for path, value in leaves(metrics)
        if isinstance(value, int | float) and not isinstance(value, bool) and not _LEFT_OUT.intersection(path)
    }


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
