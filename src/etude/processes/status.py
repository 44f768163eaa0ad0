"""The current status of a run, published in its folder and for Prometheus while the run is active."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from etude.config.schema import MetricsConfig
from etude.core.errors import RequestError, StoreError, require_extra
from etude.core.interfaces import Engine
from etude.core.secrets import masked
from etude.processes.counts import RunCounts
from etude.processes.pool import Cluster, RunnerPool
from etude.rollout.collector import Collector
from etude.store.files import open_draft
from etude.store.run_folder import RunFolder
from etude.store.status import STATUS, JournalStatus, ModelStatus, RunnerStatus, RunStatus, Team, Wait

_SECONDS = 1.0
_MOST_TIME = 0.02
"""The largest share of its time that the head spends on status, which matters with many runners."""
_COLLECTING = ("collecting", "validating", "evaluating")
"""Phases in which the episodes show what the run waits for."""


@dataclass(frozen=True)
class Parts:
    """The parts of a run that its status is made from."""

    run: RunFolder
    counts: RunCounts
    collector: Collector
    pool: RunnerPool | None
    """The runners; None if the head plays the episodes itself."""
    engines: Mapping[str, Engine]
    cluster: Cluster | None = None


@asynccontextmanager
async def publish_status(parts: Parts, metrics: MetricsConfig | None) -> AsyncIterator[None]:
    """Publish the run's status during the block: in its folder, and at its metrics address if it has one.

    Raises RequestError if that address is not available.
    """
    with serve_metrics(metrics) as server:
        publishing = asyncio.ensure_future(_publish(parts, server))
        try:
            yield
        finally:
            publishing.cancel()
            await asyncio.gather(publishing, return_exceptions=True)
            (parts.run.path / STATUS).unlink(missing_ok=True)


async def _publish(parts: Parts, server: MetricsServer | None) -> None:
    since = time.time()
    dashboard = None if parts.cluster is None else parts.cluster.dashboard
    if dashboard is not None:
        parts.counts.message(f"the cluster's dashboard: {dashboard}")
    while True:
        begun = time.thread_time()
        status = snapshot(parts, since, None if server is None else server.address)
        seconds = time.thread_time() - begun
        if server is not None:
            server.status = status
        writing = asyncio.ensure_future(asyncio.to_thread(_write, parts.run.path / STATUS, status))
        try:
            await asyncio.shield(writing)
        except StoreError:
            pass  # The journal reports a full disk.
        finally:
            # A thread cannot be cancelled, and must not write once the status is deleted.
            await asyncio.gather(writing, return_exceptions=True)
        await asyncio.sleep(max(_SECONDS, seconds / _MOST_TIME))


def _write(path: Path, status: RunStatus) -> None:
    """Write the status atomically. It is not synced: a status is useless after a power cut."""
    with open_draft(path, sync=False) as draft:
        draft.write_text(masked(status.model_dump_json(indent=1)) + "\n", encoding="utf-8")


def snapshot(parts: Parts, since: float, metrics: str | None = None) -> RunStatus:
    """Return the current status of the run. `since` is the start of its process, in Unix seconds."""
    counts, pool = parts.counts, parts.pool
    begun = parts.collector.playing if pool is None else pool.playing
    unfinished = None if counts.phase_total is None else max(0, counts.phase_total - counts.episodes)
    runners = [
        RunnerStatus(
            number=place.number,
            node="" if place.process is None else place.process.node,
            state=place.state,
            seconds=None if place.since is None else time.monotonic() - place.since,
            episodes=place.episodes,
        )
        for place in (() if pool is None else pool.places)
    ]
    models, cluster = _models(parts), parts.cluster
    learners = [
        Team(wanted=team.size, nodes=[child.node for child in team.children.values()], since=team.since)
        for team in (() if cluster is None else cluster.teams)
    ]
    journal = JournalStatus.model_validate(parts.run.journal, from_attributes=True)
    return RunStatus(
        run=parts.run.name,
        pid=os.getpid(),
        host=socket.gethostname(),
        at=time.time(),
        since=since,
        phase=counts.phase_name,
        phase_seconds=time.monotonic() - counts.phase_started,
        epoch=counts.epoch,
        num_epochs=counts.num_epochs,
        expected=counts.phase_total,
        finished=counts.episodes,
        playing=len(begun),
        waiting=None if unfinished is None else max(0, unfinished - len(begun)),
        totals=counts.totals.model_copy(),
        rewards=dict(counts.rewards),
        validation={
            target: known[-1]
            for target, validations in counts.validations.items()
            if (known := [each["avg_reward"] for each in validations if each.get("avg_reward") is not None])
        },
        runners=runners,
        learners=learners,
        models=models,
        journal=journal,
        dashboard=None if cluster is None else cluster.dashboard,
        metrics=metrics,
        waits=_waits(counts, begun, runners, learners, models, journal),
    )


def _models(parts: Parts) -> list[ModelStatus]:
    """Return the calls of each model, as counted by the processes that make them."""
    calls = [parts.collector.calls_under_way()]
    if parts.pool is not None:
        runners = [place.runner for place in parts.pool.places if place.runner is not None]
        calls = [runner.calls for runner in runners if runner.is_alive]
    models = []
    for name, engine in parts.engines.items():
        own = [each[name] for each in calls if name in each]
        models.append(
            ModelStatus(
                name=name,
                version=engine.version,
                waiting=sum(count for count, _ in own),
                oldest=max((age for _, age in own), default=None),
            )
        )
    return models


def _waits(
    counts: RunCounts,
    begun: Mapping[str, float],
    runners: list[RunnerStatus],
    learners: list[Team],
    models: list[ModelStatus],
    journal: JournalStatus,
) -> list[Wait]:
    """Return everything that the run waits for now, the longest wait first."""
    waits = [
        Wait(
            what=f"runner {each.number} to start" + (f" on {each.node}" if each.node else ": not placed yet"),
            seconds=each.seconds or 0.0,
        )
        for each in runners
        if each.state == "starting"
    ]
    waits += [
        Wait(what=f"room for {team.wanted} learners on the cluster", seconds=time.time() - team.since)
        for team in learners
        if len(team.nodes) < team.wanted
    ]
    for model in models:
        if model.waiting:
            what = f"{_number(model.waiting, 'answer')} of model '{model.name}'"
            waits.append(Wait(what=what, seconds=model.oldest or 0.0))
    now = time.monotonic()
    if begun and not any(model.waiting for model in models) and not waits:
        what = f"{_number(len(begun), 'episode')} that wait for no model: agents, tools, evaluators"
        waits.append(Wait(what=what, seconds=now - min(begun.values())))
    if not begun and not waits and counts.phase_name not in _COLLECTING:
        waits.append(Wait(what=counts.phase_name, seconds=now - counts.phase_started))
    if journal.waiting:
        what = f"the disk, for {_number(journal.waiting, 'entry', 'entries')}"
        waits.append(Wait(what=what, seconds=journal.waiting_seconds))
    return sorted(waits, key=lambda wait: -wait.seconds)


def _number(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or f'{one}s'}"


Values: TypeAlias = Callable[[RunStatus], float | Mapping[Any, float]]
"""Returns the value of a metric, or a value for each set of labels."""

_COUNTERS: tuple[tuple[str, str, str, Values], ...] = (
    (
        "episodes",
        "outcome",
        "Episodes that ended since the process began, including those already in the journal.",
        lambda s: {"completed": s.totals.finished - s.totals.failed, "failed": s.totals.failed},
    ),
    ("calls", "", "Model calls of these episodes.", lambda s: s.totals.calls),
    ("prompt_tokens", "", "Tokens of their prompts.", lambda s: s.totals.prompt_tokens),
    ("sampled_tokens", "", "Tokens sampled by them.", lambda s: s.totals.completion_tokens),
    ("scores", "", "Number of rewards of these episodes.", lambda s: s.totals.scores),
    ("epochs_trained", "", "Epochs trained on, for each target.", lambda s: s.totals.trained),
    ("epochs_skipped", "", "Epochs without data.", lambda s: s.totals.skipped),
    ("journal_entries", "", "Entries of the journal.", lambda s: s.journal.committed),
)
"""The name after `etude_`, labels (except the run), help text and values of each metric that never falls."""


def _by_model(value: Callable[[ModelStatus], float]) -> Values:
    return lambda status: {model.name: value(model) for model in status.models}


_GAUGES: tuple[tuple[str, str, str, Values], ...] = (
    # Rewards may be negative.
    ("scores_sum", "", "Rewards of these episodes, added up.", lambda s: s.totals.score_sum),
    ("episodes_playing", "", "Episodes under way.", lambda s: s.playing),
    ("episodes_waiting", "", "Episodes that have not begun.", lambda s: s.waiting or 0),
    ("epoch", "", "The epoch, from 1; 0 before the first.", lambda s: s.epoch or 0),
    ("epochs", "", "Number of epochs that the run was asked for.", lambda s: s.num_epochs),
    ("reward", "target", "Mean reward of the last epoch's episodes.", lambda s: s.rewards),
    ("validation_reward", "target", "Mean reward of the last validation.", lambda s: s.validation),
    ("phase_seconds", "phase", "Time in this phase.", lambda s: {s.phase: s.phase_seconds}),
    ("model_version", "model", "The version that is sampled from.", _by_model(lambda m: m.version)),
    ("calls_in_flight", "model", "Calls that wait for an answer.", _by_model(lambda m: m.waiting)),
    ("oldest_call_seconds", "model", "Age of the oldest call.", _by_model(lambda m: m.oldest or 0.0)),
    (
        "runners",
        "node state",
        "Processes that play episodes.",
        lambda s: Counter((each.node, each.state) for each in s.runners),
    ),
    ("journal_waiting", "", "Entries not on the disk yet.", lambda s: s.journal.waiting),
    ("status_seconds", "", "When these figures were taken; Unix seconds.", lambda s: s.at),
)
"""The same of each metric that may fall."""


class MetricsServer:
    """The latest status of a run, as a collector for a registry of Prometheus's client."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.address = ""

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; none before the first status."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        if (status := self.status) is None:
            return
        for make, metrics in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, labels, text, values in metrics:
                family = make(f"etude_{name}", text, labels=["run", *labels.split()])
                told = values(status)
                for own, value in (told if isinstance(told, Mapping) else {(): told}).items():
                    family.add_metric([status.run, *([own] if isinstance(own, str) else own)], value)
                yield family


@contextmanager
def serve_metrics(config: MetricsConfig | None) -> Iterator[MetricsServer | None]:
    """Serve metrics during the block, if the config asks for it.

    Raises MissingExtraError, and RequestError if the address is not available.
    """
    if config is None:
        yield None
        return
    require_extra("prometheus_client", "metrics for Prometheus", "metrics")
    from prometheus_client import CollectorRegistry, start_http_server

    server, registry = MetricsServer(), CollectorRegistry()
    registry.register(server)
    try:
        http, thread = start_http_server(config.port, config.host, registry)
    except OSError as error:
        raise RequestError(
            f"metrics cannot be served at {config.host}:{config.port}: {error}; choose another metrics.port"
        ) from error
    host = f"[{config.host}]" if ":" in config.host else config.host
    server.address = f"http://{host}:{http.server_port}/metrics"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
