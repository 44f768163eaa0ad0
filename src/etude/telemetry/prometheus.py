"""The metrics server: a run's status as metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias

from etude.config.schema import MetricsConfig
from etude.core.errors import RequestError, require_extra
from etude.store.status import ModelStatus, RunStatus

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
