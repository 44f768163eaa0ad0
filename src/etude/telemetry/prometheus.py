"""A run's status as metrics for Prometheus, at an address of its own."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from etude.config.schema import MetricsConfig
from etude.core.errors import MissingExtraError, RequestError
from etude.store.status import RunStatus
from etude.wire.http_server import ThreadServer, is_loopback, listen

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from starlette.datastructures import Headers
    from starlette.types import Scope

_LARGEST_BODY = 1024

Sample: TypeAlias = tuple[tuple[str, ...], float]
"""The values of a metric's own labels, and its value."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its name, its kind, what it says, its own labels, and its values."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    samples: list[Sample] = field(default_factory=list)

    def family(self, run: str) -> CounterMetricFamily | GaugeMetricFamily:
        """As Prometheus's client has it, with the run as the first label."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.help, labels=["run", *self.labels])
        for labels, value in self.samples:
            family.add_metric([run, *labels], value)
        return family


class MetricsServer:
    """Answers with the latest status of a run."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.address = ""

    def collect(self) -> Iterator[Any]:
        """The metrics, for a registry of Prometheus's client; none before the first status."""
        status = self.status
        if status is not None:
            yield from (metric.family(status.run) for metric in metrics_of(status, time.time()))


@asynccontextmanager
async def served(config: MetricsConfig | None) -> AsyncIterator[MetricsServer | None]:
    """A server of metrics for the duration, where the config asks for one.

    Raises MissingExtraError, and RequestError where the address cannot be had.
    """
    if config is None:
        yield None
        return
    if find_spec("prometheus_client") is None:
        raise MissingExtraError("metrics for Prometheus", "metrics")
    from prometheus_client import CollectorRegistry, make_asgi_app

    from etude.wire.request_checks import RequestChecks, require_own_name

    def check(scope: Scope, headers: Headers) -> None:
        if is_loopback(config.host):
            require_own_name(headers)

    server, registry = MetricsServer(), CollectorRegistry()
    registry.register(server)
    try:
        listening = listen(config.host, config.port)
    except RequestError as error:
        raise RequestError(
            f"metrics cannot be served at {config.host}:{config.port}: {error}: --metrics-port"
        ) from error
    app = RequestChecks(make_asgi_app(registry), check, max_body=lambda path: _LARGEST_BODY)
    http = ThreadServer(app, listening)
    host = f"[{config.host}]" if ":" in config.host else config.host
    server.address = f"http://{host}:{listening.getsockname()[1]}/metrics"
    try:
        yield server
    finally:
        await asyncio.to_thread(http.close)


def metrics_of(status: RunStatus, now: float) -> Iterable[Metric]:
    """All metrics of a status that is looked at `now`, in Unix seconds."""
    yield from _of_episodes(status)
    yield from _of_training(status)
    yield from _of_models(status)
    yield from _of_places(status)
    yield _gauge("etude_status_age_seconds", "Age of these figures.", max(0.0, now - status.at))


def _of_episodes(status: RunStatus) -> Iterator[Metric]:
    totals = status.totals
    ended = Metric(
        "etude_episodes",
        "counter",
        "Episodes that ended since the process began; those that the journal had already are among them.",
        ("outcome",),
    )
    ended.samples.extend([(("completed",), totals.finished - totals.failed), (("failed",), totals.failed)])
    yield ended
    for name, text, value in (
        ("etude_calls", "Model calls of these episodes.", totals.calls),
        ("etude_prompt_tokens", "Tokens of the prompts of these calls.", totals.prompt_tokens),
        ("etude_sampled_tokens", "Tokens sampled by these calls.", totals.completion_tokens),
        ("etude_scores", "Rewards of these episodes: how many.", totals.scores),
    ):
        yield Metric(name, "counter", text, samples=[((), value)])
    # Rewards may be negative, and a counter never falls.
    yield _gauge("etude_scores_sum", "Rewards of these episodes, added up.", totals.score_sum)
    yield _gauge("etude_episodes_playing", "Episodes under way.", status.playing)
    if status.waiting is not None:
        yield _gauge("etude_episodes_waiting", "Episodes of the phase that have not begun.", status.waiting)


def _of_training(status: RunStatus) -> Iterator[Metric]:
    yield _gauge("etude_epoch", "The epoch, from 1; 0 before the first.", status.epoch or 0)
    yield _gauge("etude_epochs", "Epochs that the run was asked for.", status.num_epochs)
    for name, text, value in (
        ("etude_epochs_trained", "Epochs that were trained on, each target's.", status.totals.trained),
        ("etude_epochs_skipped", "Epochs that had nothing to train on.", status.totals.skipped),
    ):
        yield Metric(name, "counter", text, samples=[((), value)])
    for name, text, rewards in (
        ("etude_reward", "Mean reward of the last epoch's episodes.", status.rewards),
        ("etude_validation_reward", "Mean reward of the last validation.", status.validation),
    ):
        yield Metric(
            name, "gauge", text, ("target",), [((target,), value) for target, value in rewards.items()]
        )
    yield Metric(
        "etude_phase_seconds",
        "gauge",
        "For how long the run has been in this phase.",
        ("phase",),
        [((status.phase,), status.phase_seconds)],
    )


def _of_models(status: RunStatus) -> Iterator[Metric]:
    version = Metric("etude_model_version", "gauge", "The version that is sampled from.", ("model",))
    waiting = Metric("etude_calls_in_flight", "gauge", "Calls that wait for an answer.", ("model",))
    oldest = Metric("etude_oldest_call_seconds", "gauge", "Age of the oldest of these calls.", ("model",))
    for model in status.models:
        version.samples.append(((model.name,), model.version))
        waiting.samples.append(((model.name,), model.waiting))
        oldest.samples.append(((model.name,), model.oldest or 0.0))
    yield from (version, waiting, oldest)


def _of_places(status: RunStatus) -> Iterator[Metric]:
    runners = Metric("etude_runners", "gauge", "Processes that play episodes.", ("node", "state"))
    placed = Counter((each.node, each.state) for each in status.runners)
    runners.samples.extend(placed.items())
    learners = Metric("etude_learners", "gauge", "Processes that train a job on a cluster.", ("node",))
    learners.samples.extend(
        ((node,), count) for node, count in Counter(n for t in status.learners for n in t.nodes).items()
    )
    yield from (runners, learners)
    committed = status.journal.committed
    yield Metric(
        "etude_journal_entries", "counter", "Entries written to the journal.", samples=[((), committed)]
    )
    yield _gauge("etude_journal_waiting", "Entries not on the disk yet.", status.journal.waiting)


def _gauge(name: str, text: str, value: float) -> Metric:
    return Metric(name, "gauge", text, samples=[((), value)])
