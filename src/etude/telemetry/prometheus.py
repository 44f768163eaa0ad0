"""A run's status as metrics for Prometheus, at an address of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

from etude.config.schema import MetricsConfig
from etude.core.errors import MissingExtraError, RequestError
from etude.store.status import ModelStatus, RunStatus

Sample: TypeAlias = tuple[tuple[str, ...], float]
"""The values of a metric's own labels, and its value."""
Kind: TypeAlias = Literal["counter", "gauge"]
Metric: TypeAlias = tuple[Kind, str, str, tuple[str, ...], Callable[[RunStatus], Iterable[Sample]]]
"""Its kind, its name, what it says, its labels but for the run, and its values."""


def _one(kind: Kind, name: str, text: str, value: Callable[[RunStatus], float]) -> Metric:
    return kind, name, text, (), lambda status: [((), value(status))]


def _by(
    label: str, name: str, text: str, values: Callable[[RunStatus], Iterable[tuple[str, float]]]
) -> Metric:
    """A gauge with a label of its own."""
    return "gauge", name, text, (label,), lambda status: [((own,), value) for own, value in values(status)]


def _of_models(name: str, text: str, value: Callable[[ModelStatus], float]) -> Metric:
    return _by("model", name, text, lambda status: [(model.name, value(model)) for model in status.models])


METRICS: tuple[Metric, ...] = (
    (
        "counter",
        "etude_episodes",
        "Episodes that ended since the process began; those that the journal had already are among them.",
        ("outcome",),
        lambda s: [
            (("completed",), s.totals.finished - s.totals.failed),
            (("failed",), s.totals.failed),
        ],
    ),
    _one("counter", "etude_calls", "Model calls of these episodes.", lambda s: s.totals.calls),
    _one("counter", "etude_prompt_tokens", "Tokens of their prompts.", lambda s: s.totals.prompt_tokens),
    _one("counter", "etude_sampled_tokens", "Tokens sampled by them.", lambda s: s.totals.completion_tokens),
    _one("counter", "etude_scores", "Rewards of these episodes: how many.", lambda s: s.totals.scores),
    # Rewards may be negative, and a counter never falls.
    _one("gauge", "etude_scores_sum", "Rewards of these episodes, added up.", lambda s: s.totals.score_sum),
    _one("gauge", "etude_episodes_playing", "Episodes under way.", lambda s: s.playing),
    _one("gauge", "etude_episodes_waiting", "Episodes that have not begun.", lambda s: s.waiting or 0),
    _one("gauge", "etude_epoch", "The epoch, from 1; 0 before the first.", lambda s: s.epoch or 0),
    _one("gauge", "etude_epochs", "Epochs that the run was asked for.", lambda s: s.num_epochs),
    _one("counter", "etude_epochs_trained", "Epochs trained on, each target's.", lambda s: s.totals.trained),
    _one("counter", "etude_epochs_skipped", "Epochs without data.", lambda s: s.totals.skipped),
    _by("target", "etude_reward", "Mean reward of the last epoch's episodes.", lambda s: s.rewards.items()),
    _by(
        "target",
        "etude_validation_reward",
        "Mean reward of the last validation.",
        lambda s: s.validation.items(),
    ),
    _by(
        "phase",
        "etude_phase_seconds",
        "For how long the run has been in this phase.",
        lambda s: [(s.phase, s.phase_seconds)],
    ),
    _of_models("etude_model_version", "The version that is sampled from.", lambda m: m.version),
    _of_models("etude_calls_in_flight", "Calls that wait for an answer.", lambda m: m.waiting),
    _of_models("etude_oldest_call_seconds", "Age of the oldest of these calls.", lambda m: m.oldest or 0.0),
    (
        "gauge",
        "etude_runners",
        "Processes that play episodes.",
        ("node", "state"),
        lambda s: Counter((each.node, each.state) for each in s.runners).items(),
    ),
    _one("counter", "etude_journal_entries", "Entries of the journal.", lambda s: s.journal.committed),
    _one("gauge", "etude_journal_waiting", "Entries not on the disk yet.", lambda s: s.journal.waiting),
    _one("gauge", "etude_status_seconds", "When these figures were so; Unix seconds.", lambda s: s.at),
)


class MetricsServer:
    """The latest status of a run, for a registry of Prometheus's client."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.address = ""

    def collect(self) -> Iterator[Any]:
        """The metrics; none before the first status."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self.status
        for kind, name, text, labels, samples in METRICS if status is not None else ():
            assert status is not None
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family = make(name, text, labels=["run", *labels])
            for own, value in samples(status):
                family.add_metric([status.run, *own], value)
            yield family


@contextmanager
def served(config: MetricsConfig | None) -> Iterator[MetricsServer | None]:
    """A server of metrics for the duration, where the config asks for one.

    Raises MissingExtraError, and RequestError where the address cannot be had.
    """
    if config is None:
        yield None
        return
    if find_spec("prometheus_client") is None:
        raise MissingExtraError("metrics for Prometheus", "metrics")
    from prometheus_client import CollectorRegistry, start_http_server

    server, registry = MetricsServer(), CollectorRegistry()
    registry.register(server)
    try:
        http, thread = start_http_server(config.port, config.host, registry)
    except OSError as error:
        raise RequestError(
            f"metrics cannot be served at {config.host}:{config.port}: {error}; set metrics.port"
        ) from error
    host = f"[{config.host}]" if ":" in config.host else config.host
    server.address = f"http://{host}:{http.server_port}/metrics"
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
