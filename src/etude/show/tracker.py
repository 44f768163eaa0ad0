"""The interface of trackers: the records that they get from a run's journal, and their methods.

A tracker never sees the run itself. It gets only data from the journal, so nothing is lost while it is away.
A custom tracker has the same guarantees as the built-in ones.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.document import join_path, leaves
from etude.config.import_path import import_object
from etude.config.registry import config_factory, register_tracker
from etude.core.errors import RequestError
from etude.core.history import EpochEntry, entry_sort_key
from etude.engines.bill import Bill, BillEntry, load_bill, total
from etude.loop.arguments import Live
from etude.store.log import end_of_run, read_states
from etude.store.run_folder import RunFolder

Kind: TypeAlias = Literal["warm_up", "validation", "epoch", "evaluation", "finished"]
State: TypeAlias = Literal["finished", "failed", "stopped"]
"""The end of a process's part of a run. A `stopped` run may be resumed."""

PATIENCE = 30.0
"""The most seconds to wait, at the end of a run, until all data arrived. `etude resume` sends the rest."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One event of a run: a finished warm-up, epoch, validation or evaluation, or the end."""

    key: str
    """The same whenever the same record is read."""
    kind: Kind
    step: int
    """The number of epochs finished, including its own."""
    at: float
    """When it happened, in Unix seconds."""
    metrics: Mapping[str, float]
    """Values under names such as `train/avg_reward`, `learner/loss`, `validation/reward_low`."""
    target: str | None = None
    """The model that it is about, if the run trains several."""
    alarms: tuple[str, ...] = ()
    """The alarms that ring in it, a sentence each."""
    number: int = 0
    """The number of records that the tracker was sent before."""


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run that a tracker shows."""

    name: str
    folder: Path
    token: str
    """Letters and digits that identify this run at this tracker. The journal keeps them, so a resumed run has
    the same ones."""
    config: Mapping[str, Any]
    """The config as in the run folder, without secrets."""
    environment: Mapping[str, Any]
    """Versions of Python, Etude and all packages, the machine, and the `git` commit."""

    @property
    def flat_config(self) -> dict[str, str]:
        """The config as text by join_path names: `{"llms.policy.model": "Qwen/Qwen3-0.6B"}`."""
        return {join_path(path): str(value) for path, value in leaves(self.config) if value is not None}

    @property
    def code(self) -> dict[str, str]:
        """The versions of the code: `etude`, `python`, and the `git` commit of the user's folder."""
        known = self.environment
        versions = {name: str(known[name]) for name in ("etude", "python") if known.get(name)}
        if git := known.get("git"):
            versions["git"] = str(git["commit"]) + (", with changes" if git["dirty"] else "")
        return versions


class Tracker(Protocol):
    """The interface that shows a run elsewhere. One thread calls all methods, which may wait and raise.

    After an error, `open` is called again some time later, and then `send` with the same record. Each record
    is sent at least once. It is sent again, with the same `key` and `number`, if the process was killed
    before the journal noted it as sent.
    """

    def open(self, run: TrackedRun) -> str:
        """Begin to show a run, or continue the view of `run.token` from before.

        Return where to look at it, as a few words or an address; empty for nowhere.
        """

    def send(self, record: RunRecord) -> None:
        """Show a record. It counts as shown once this has returned."""

    def close(self, state: State) -> None:
        """End this process's part. Another process may open the tracker again."""


_LEFT_OUT = {"target", "training", "model_versions", "failure_causes"}
"""Metrics that are not figures of an epoch, or have an unlimited number of names."""


def list_records(run: RunFolder, sent: Collection[str] = ()) -> Iterator[RunRecord]:
    """Yield all records of a run so far, in order, except the sent ones. Raises StoreError."""
    states, bill = read_states(run.journal), load_bill(run.journal)
    by_target = {target: each.history for target, each in states.items()}
    for target, history in by_target.items():
        key, prefix = _key("warm_up", 0, target), _prefix(target)
        if (entry := history.warm_up) is not None and key not in sent:
            about = {**entry.metrics, "steps": entry.steps, "seconds": entry.seconds}
            at = datetime.fromisoformat(entry.timestamp).timestamp()
            yield RunRecord(key, "warm_up", 0, at, figures(about, f"{prefix}warm_up/"), target)
    entries = [(target, entry) for target, history in by_target.items() for entry in history.entries]
    for target, each in sorted(entries, key=lambda pair: entry_sort_key(pair[1])):
        if (key := _key(each.kind, each.epoch, target)) not in sent:
            yield RunRecord(
                key=key,
                kind=each.kind,
                step=each.epoch,
                at=datetime.fromisoformat(each.timestamp).timestamp(),
                metrics=_epoch_figures(each, _prefix(target), bill, target == next(iter(by_target)))
                if isinstance(each, EpochEntry)
                else figures(each.metrics, f"{_prefix(target)}validation/"),
                target=target,
                alarms=tuple(event.text for event in each.alarms if event.is_new),
            )
    if (ended := end_of_run(states)) is None:
        return
    at = datetime.fromisoformat(ended.timestamp).timestamp()
    step = max(len(history.epochs) for history in by_target.values())
    if ended.result is not None:
        if "evaluation" not in sent:
            yield RunRecord("evaluation", "evaluation", 0, at, figures(ended.result, "evaluation/"))
    elif (key := _key("finished", step, None)) not in sent:
        metrics = {f"total/{name}": value for name, value in _costs(bill.total).items()}
        metrics["total/hours"] = bill.seconds / 3600
        yield RunRecord(key, "finished", step, at, metrics)


def _key(kind: str, epoch: int, target: str | None) -> str:
    return f"{kind}/{epoch:08d}" + ("" if target is None else f"/{target}")


def _prefix(target: str | None) -> str:
    return "" if target is None else f"{target}/"


def _epoch_figures(entry: EpochEntry, prefix: str, bill: Bill, has_episodes: bool) -> dict[str, float]:
    metrics = figures(entry.metrics, f"{prefix}train/")
    metrics |= figures(entry.metrics.get("training") or {}, f"{prefix}learner/")
    tokens, seconds = (entry.metrics.get(key) for key in ("completion_tokens", "collecting_seconds"))
    if tokens and seconds:
        metrics[f"{prefix}train/tokens_per_second"] = tokens / seconds
    if has_episodes:
        # The first model reports the cost of episodes that several models share.
        phase = re.compile(rf"train/{entry.epoch}(?!\d)")
        lines = [line for line in bill.lines if phase.match(line.phase)]
        metrics |= {f"cost/{name}": value for name, value in _costs(total(lines)).items()}
    if entry.status is not None:
        job = [line for line in bill.lines if line.phase == entry.status.run_id]
        metrics |= {f"{prefix}learner/cost_{name}": value for name, value in _costs(total(job)).items()}
    return metrics


def figures(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return all numbers in the metrics by their paths. Other values cannot be plotted."""
    return {
        f"{prefix}{'/'.join(map(str, path))}": float(value)
        for path, value in leaves(metrics)
        if isinstance(value, int | float) and not isinstance(value, bool) and not _LEFT_OUT.intersection(path)
    }


def _costs(line: BillEntry) -> dict[str, float]:
    return {"usd": line.usd, "tokens": float(line.tokens)} if line.tokens else {}


class FunctionTrackerConfig(TrackerConfig, name="function"):
    """Your function that is called with each record of the run, or your own `etude.Tracker`."""

    function: str
    """The import path, as `module:name`."""

    def destination(self) -> str:
        return self.function


class LiveTrackerConfig(Live, TrackerConfig, name="live"):
    """A function that a program gave as a Python object."""

    def destination(self) -> str:
        return self.name


class FunctionTracker(Tracker):
    """A tracker that calls a function, plain or async, with each record."""

    def __init__(self, function: Callable[[RunRecord], Any]) -> None:
        self._function = function

    def open(self, run: TrackedRun) -> str:
        return ""

    def send(self, record: RunRecord) -> None:
        result = self._function(record)
        if inspect.iscoroutine(result):
            asyncio.run(result)

    def close(self, state: State) -> None:
        pass


def as_tracker(value: Any) -> Tracker:
    """Return a tracker for a function, a tracker, or a class of trackers. Raises RequestError."""
    if isinstance(value, type):
        value = value()
    if all(callable(getattr(value, name, None)) for name in ("open", "send", "close")):
        tracker: Tracker = value
        return tracker
    if not callable(value):
        raise RequestError(f"a tracker must be a function or have open, send and close: {value!r:.80}")
    return FunctionTracker(value)


register_tracker(config_type=FunctionTrackerConfig)(
    config_factory(lambda config: as_tracker(import_object(config.function)))
)


@register_tracker(config_type=LiveTrackerConfig)
async def live_tracker(config: LiveTrackerConfig, builder: Builder) -> AsyncIterator[Tracker]:
    """Yield the function. If its program is not running, the first record raises RequestError."""

    def missing(record: RunRecord) -> None:
        run = "run" if builder.run is None else str(builder.run.path)
        raise RequestError(
            f"the run was started by a program with its own function '{config.name}', which is not in the "
            f"config; pass it again in Python: etude.resume({run!r}, report=…)"
        )

    yield as_tracker(missing if config.value is None else config.value)
