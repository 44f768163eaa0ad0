"""Trackers: their interface, the records that they get from a run's journal, and the threads that send them.

A tracker never sees the run itself. It gets only data from the journal, so nothing is lost while it is away.
A custom tracker has the same guarantees as the built-in ones. Trackers are woken when something is
journalled, and awaited at the end of the run. The journal notes a record once it has been sent, so it is sent
again if the process was killed meanwhile. An unreachable tracker is tried again every ten seconds.
"""

import asyncio
import secrets
import shlex
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeAlias

from etude.config.builder import Builder
from etude.config.component import TrackerConfig
from etude.config.document import join_path, leaves
from etude.config.registry import register_tracker
from etude.core.errors import BudgetReached, EtudeError, RequestError, StoreError, first_line, require_extra
from etude.core.history import EpochEntry, entry_sort_key
from etude.core.interfaces import Progress
from etude.core.keys import content_hash
from etude.core.records import ModelState
from etude.engines.ledger import Bill, BillEntry, load_bill, total
from etude.store.episodes import phase_stage
from etude.store.histories import end_of_run
from etude.store.journal import Json, read_states
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data

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
    """Letters and digits that identify this run at this tracker, also when it is resumed."""
    config: Mapping[str, Any]
    """The config as in the run folder, without secrets."""
    environment: Mapping[str, Any]
    """Versions of Python, Etude and all packages, the machine, and the `git` commit."""

    @property
    def flat_config(self) -> dict[str, str]:
        """The config as text by dotted names: `{"llms.policy.model": "Qwen/Qwen3-0.6B"}`."""
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


def register_package_tracker(
    config_type: type[TrackerConfig], tracker: Callable[[Any], Tracker], package: str
) -> None:
    """Register a tracker that needs a package, from the extra with the name of its type."""

    async def build(config: TrackerConfig, builder: Builder) -> AsyncIterator[Tracker]:
        """Build the tracker. Raises MissingExtraError."""
        require_extra(package, f"the tracker '{config.type_name}'", config.type_name)
        yield tracker(config)

    register_tracker(config_type=config_type)(build)


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
        if (key := _key(each.kind, each.epoch, target)) in sent:
            continue
        at, prefix = datetime.fromisoformat(each.timestamp).timestamp(), _prefix(target)
        alarms = tuple(event.text for event in each.alarms if event.is_new)
        if isinstance(each, EpochEntry):
            metrics = _epoch_figures(each, states[target], prefix, bill, target == next(iter(states)))
        else:
            metrics = figures(each.metrics, f"{prefix}validation/")
        yield RunRecord(key, each.kind, each.epoch, at, metrics, target, alarms)
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


def _epoch_figures(
    entry: EpochEntry, state: ModelState, prefix: str, bill: Bill, has_episodes: bool
) -> dict[str, float]:
    metrics = figures(entry.metrics, f"{prefix}train/")
    metrics |= figures(entry.metrics.get("training") or {}, f"{prefix}learner/")
    tokens, seconds = (entry.metrics.get(key) for key in ("completion_tokens", "collecting_seconds"))
    if tokens and seconds:
        metrics[f"{prefix}train/tokens_per_second"] = tokens / seconds
    if has_episodes:
        # The first model reports the cost of episodes that several models share.
        lines = [line for line in bill.lines if phase_stage(line.phase) == ("train", entry.epoch)]
        metrics |= {f"cost/{name}": value for name, value in _costs(total(lines)).items()}
    names = {each.ref.run_id for each in state.submissions.values() if each.epoch == entry.epoch - 1}
    jobs = total([line for line in bill.lines if line.phase in names])
    return metrics | {f"{prefix}learner/cost_{name}": value for name, value in _costs(jobs).items()}


def figures(metrics: Mapping[str, Any], prefix: str) -> dict[str, float]:
    """Return all numbers in the metrics by their paths. Other values cannot be plotted."""
    return {
        f"{prefix}{'/'.join(map(str, path))}": float(value)
        for path, value in leaves(metrics)
        if isinstance(value, int | float) and not isinstance(value, bool) and not _LEFT_OUT.intersection(path)
    }


def _costs(line: BillEntry) -> dict[str, float]:
    return {"usd": line.usd, "tokens": float(line.tokens)} if line.tokens else {}


_PAUSE = 10.0
_SECONDS_AFTER_STOP = 2.0
"""A user who has stopped a run does not want to wait for its trackers."""
_SECONDS_TO_STORE = 60.0


class TrackerReader:
    """The thread that serves one tracker until it is closed."""

    def __init__(self, tracker: Tracker, config: TrackerConfig, run: RunFolder, progress: Progress) -> None:
        to = config.destination()
        self.title = f"{config.type_name} ({to})" if to else config.type_name
        self.error = ""
        """The error of the last attempt to send; empty if it succeeded."""
        self.thread = threading.Thread(target=self._work, name=f"etude-{self.title}", daemon=True)
        """It has an `ident` once there was anything to send. It ends after `close`."""
        self._is_abandoned = False
        """Whether to end without waiting for the tracker."""
        self._key = f"report/{config.type_name}-{content_hash(to)[:8]}"
        self._tracker, self._folder, self._progress = tracker, run, progress
        self._loop = asyncio.get_running_loop()
        self._wake = threading.Event()
        self._state: State | None = None
        self._is_open = False
        self._sentences: set[str] = set()

    def wake(self) -> None:
        """Look for new records. The first call starts the thread."""
        if self.thread.ident is None:
            self.thread.start()
        self._wake.set()

    async def close(self, state: State) -> None:
        """Send the remaining records and end, and say what could not be sent in time."""
        self._state = state
        self.wake()
        seconds = min(PATIENCE, _SECONDS_AFTER_STOP) if state == "stopped" else PATIENCE
        await asyncio.to_thread(self.thread.join, seconds)
        self._is_abandoned = True
        self._wake.set()
        with RunFolder.read(self._folder.path) as run:
            keys = {record.key for record in list_records(run)}
            sent = self._sent_keys(run) & keys
        if len(sent) < len(keys):
            why = self.error or f"the rest could not be sent within {seconds:g} s after its end"
            self._progress.message(
                f"{self.title} has {len(sent)} of {len(keys)} records of the run ({why}). Send "
                f"the rest with: etude resume {shlex.quote(str(self._folder.path))}",
                warning=True,
            )

    def _work(self) -> None:
        while not self._is_abandoned:
            self._wake.wait(timeout=_PAUSE)
            self._wake.clear()
            state = self._state
            try:
                self._serve()
                if state is not None:
                    if self._is_open:
                        self._tracker.close(state)
                    break
                self.error = ""
            except (Exception, SystemExit) as error:  # noqa: BLE001  trackers raise whatever they like
                self._is_open = False
                text, kind = first_line(error), type(error).__name__
                self.error = text if isinstance(error, EtudeError) else f"{kind}: {text}" if text else kind
                warning_text = (
                    f"{self.title} accepts no records: {self.error}. The run continues, and sends them later"
                )
                self._say_once(warning_text, warning=True)
                if isinstance(error, RequestError):
                    break  # Another try would fail in the same way.

    def _serve(self) -> None:
        with RunFolder.read(self._folder.path) as run:
            sent = self._sent_keys(run)
            for record in list_records(run, sent):
                if self._is_abandoned:
                    return
                if not self._is_open:
                    self._open(run)
                self._tracker.send(replace(record, number=len(sent)))
                self._put(f"{self._key}/sent/{record.key}", {"sent": True})
                sent.add(record.key)

    def _open(self, run: RunFolder) -> None:
        stored = run.journal.get(f"{self._key}/run")
        if stored is None:
            stored = {"token": secrets.token_hex(8), "tracker": self.title}
            self._put(f"{self._key}/run", stored)
        where = self._tracker.open(
            TrackedRun(
                name=run.name,
                folder=run.path,
                token=str(stored["token"]),
                config=stored_data(run.path, required=False),
                environment=run.read_json("environment.json") or {},
            )
        )
        self._is_open = True
        if where:
            self._say_once(f"{self.title}: {where}")

    def _sent_keys(self, run: RunFolder) -> set[str]:
        """Return the keys of the records that were sent."""
        prefix = f"{self._key}/sent/"
        return {key.removeprefix(prefix) for key, row in run.journal.scan(prefix) if row["sent"]}

    def _put(self, key: str, value: Json) -> None:
        """Journal an entry, and return when it is on disk."""
        if self._loop.is_closed():
            raise StoreError(f"{self._folder.path}: the run is over")
        storing = asyncio.run_coroutine_threadsafe(self._folder.journal.put(key, value), self._loop)
        storing.result(timeout=_SECONDS_TO_STORE)

    def _say_once(self, text: str, *, warning: bool = False) -> None:
        if text not in self._sentences:
            self._sentences.add(text)
            with suppress(RuntimeError):  # Nobody listens on a closed loop.
                self._loop.call_soon_threadsafe(lambda: self._progress.message(text, warning=warning))


class Reporting:
    """The trackers of an open run, as a context manager. Nothing is sent before `wake`."""

    def __init__(self, builder: Builder, run: RunFolder, progress: Progress) -> None:
        """`builder` builds the trackers, and closes them at the end."""
        self._builder, self._run, self._progress = builder, run, progress
        self._readers: list[TrackerReader] = []
        self._exits = AsyncExitStack()

    def wake(self) -> None:
        """Let the trackers look for new records in the journal. Returns at once."""
        for reader in self._readers:
            reader.wake()

    async def __aenter__(self) -> Self:
        """Build the trackers. Raises RequestError if one cannot be built, for example without its extra."""
        builder = await self._exits.enter_async_context(self._builder)
        for each, config in zip(await builder.get_trackers(), builder.config.report, strict=True):
            self._readers.append(TrackerReader(each, config, self._run, self._progress))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_stop = not isinstance(error, Exception) or isinstance(error, BudgetReached)
        state: State = "finished" if error is None else "stopped" if is_stop else "failed"
        # A run that failed before anything was journalled has nothing to show.
        readers = [reader for reader in self._readers if error is None or reader.thread.ident is not None]
        try:
            await asyncio.gather(*(reader.close(state) for reader in readers))
        finally:
            await self._exits.aclose()
