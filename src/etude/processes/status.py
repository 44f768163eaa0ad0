"""The current status of a run, published in its folder while the run is active."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from etude.core.errors import StoreError
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
async def publish_status(parts: Parts) -> AsyncIterator[None]:
    """Publish the run's status in its folder during the block."""
    publishing = asyncio.ensure_future(_publish(parts))
    try:
        yield
    finally:
        publishing.cancel()
        await asyncio.gather(publishing, return_exceptions=True)
        (parts.run.path / STATUS).unlink(missing_ok=True)


async def _publish(parts: Parts) -> None:
    since = time.time()
    dashboard = None if parts.cluster is None else parts.cluster.dashboard
    if dashboard is not None:
        parts.counts.message(f"the cluster's dashboard: {dashboard}")
    while True:
        begun = time.thread_time()
        status = snapshot(parts, since)
        seconds = time.thread_time() - begun
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


def snapshot(parts: Parts, since: float) -> RunStatus:
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
