"""A run as it is at one moment."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from etude.core.interfaces import Engine
from etude.rollout.collector import Collector
from etude.runners.places import Place
from etude.runners.pool import RunnerPool
from etude.store.run_folder import RunFolder
from etude.store.status import (
    ClusterStatus,
    JournalStatus,
    ModelStatus,
    RunnerStatus,
    RunStatus,
    Wait,
)
from etude.store.teams import Team, teams_of
from etude.telemetry.counts import RunCounts

_COLLECTING = ("collecting", "validating", "evaluating")
"""Phases in which episodes say what is waited for."""


@dataclass(frozen=True)
class Parts:
    """The parts of a run that its status is made from."""

    run: RunFolder
    counts: RunCounts
    collector: Collector
    pool: RunnerPool | None
    """The runners; None where the head plays the episodes itself."""
    engines: Mapping[str, Engine]
    cluster: Callable[[], ClusterStatus | None] | None = None
    """Asks the cluster for its nodes, which may take a while."""


def snapshot(
    parts: Parts, since: float, cluster: ClusterStatus | None = None, metrics: str | None = None
) -> RunStatus:
    """The run as it is now. `since` is when its process began, in Unix seconds."""
    counts, pool = parts.counts, parts.pool
    begun = parts.collector.playing if pool is None else pool.playing
    unfinished = None if counts.expected is None else max(0, counts.expected - counts.episodes)
    runners = [] if pool is None else [_runner(place) for place in pool.places]
    models, learners = _models(parts), teams_of(parts.run.path)
    stored = parts.run.journal
    journal = JournalStatus(
        committed=stored.committed, waiting=stored.waiting, waiting_seconds=stored.waiting_seconds
    )
    return RunStatus(
        run=parts.run.name,
        pid=os.getpid(),
        host=socket.gethostname(),
        at=time.time(),
        since=since,
        phase=counts.phase_name,
        phase_seconds=time.monotonic() - counts.phase_since,
        epoch=counts.epoch,
        num_epochs=counts.num_epochs,
        expected=counts.expected,
        finished=counts.episodes,
        playing=len(begun),
        waiting=None if unfinished is None else max(0, unfinished - len(begun)),
        totals=counts.totals,
        rewards=dict(counts.rewards),
        validation=dict(counts.validation),
        runners=runners,
        learners=learners,
        models=models,
        journal=journal,
        cluster=cluster,
        metrics=metrics,
        waits=_waits(counts, begun, runners, learners, models, journal),
    )


def _runner(place: Place) -> RunnerStatus:
    return RunnerStatus(
        number=place.number,
        node="" if place.process is None else place.process.node,
        state=place.state,
        seconds=None if place.since is None else time.monotonic() - place.since,
        episodes=place.episodes,
    )


def _models(parts: Parts) -> list[ModelStatus]:
    """Calls as the processes know them that make them."""
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
    """All that keeps the run from going on now, the longest wait first."""
    waits = [
        Wait(
            what=f"runner {each.number} to start"
            + (f" on {each.node}" if each.node else ": nowhere placed yet"),
            seconds=each.seconds or 0.0,
        )
        for each in runners
        if each.state == "starting"
    ]
    waits += [
        Wait(what=f"room for {team.wanted} learners on the cluster", seconds=time.time() - team.since)
        for team in learners
        if not team.nodes
    ]
    for model in models:
        if model.waiting:
            what = f"{_number(model.waiting, 'answer')} of model '{model.name}'"
            waits.append(Wait(what=what, seconds=model.oldest or 0.0))
    now = time.monotonic()
    if begun and not any(model.waiting for model in models) and not waits:
        what = f"{_number(len(begun), 'episode')} in which no model is asked: agents, tools, evaluators"
        waits.append(Wait(what=what, seconds=now - min(begun.values())))
    if not begun and not waits and counts.phase_name not in _COLLECTING:
        waits.append(Wait(what=counts.phase_name, seconds=now - counts.phase_since))
    if journal.waiting:
        what = f"the disk, for {_number(journal.waiting, 'entry', 'entries')}"
        waits.append(Wait(what=what, seconds=journal.waiting_seconds))
    return sorted(waits, key=lambda wait: -wait.seconds)


def _number(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or f'{one}s'}"
