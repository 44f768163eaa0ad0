"""The metrics server: a run's status as metrics for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Literal, TypeAlias

from etude.config.schema import MetricsConfig
from etude.core.errors import MissingExtraError, RequestError
from etude.store.status import ModelStatus, RunStatus

Values: TypeAlias = Callable[[RunStatus], float | Mapping[Any, float]]
"""Returns the value of a metric, or a value for each set of labels."""


def _of_models(value: Callable[[ModelStatus], float]) -> Values:
    return lambda status: {model.name: value(model) for model in status.models}


METRICS: tuple[tuple[Literal["counter", "gauge"], str, str, str, Values], ...] = (
    (
        "counter",
        "etude_episodes",
        "outcome",
        "Episodes that ended since the process began; those that the journal had already are among them.",
        lambda s: {"completed": s.totals.finished - s.totals.failed, "failed": s.totals.failed},
    ),
    ("counter", "etude_calls", "", "Model calls of these episodes.", lambda s: s.totals.calls),
    ("counter", "etude_prompt_tokens", "", "Tokens of their prompts.", lambda s: s.totals.prompt_tokens),
    ("counter", "etude_sampled_tokens", "", "Tokens sampled by them.", lambda s: s.totals.completion_tokens),
    ("counter", "etude_scores", "", "Rewards of these episodes: how many.", lambda s: s.totals.scores),
    # Rewards may be negative, and a counter never falls.
    ("gauge", "etude_scores_sum", "", "Rewards of these episodes, added up.", lambda s: s.totals.score_sum),
    ("gauge", "etude_episodes_playing", "", "Episodes under way.", lambda s: s.playing),
    ("gauge", "etude_episodes_waiting", "", "Episodes that have not begun.", lambda s: s.waiting or 0),
    ("gauge", "etude_epoch", "", "The epoch, from 1; 0 before the first.", lambda s: s.epoch or 0),
    ("gauge", "etude_epochs", "", "Epochs that the run was asked for.", lambda s: s.num_epochs),
    ("counter", "etude_epochs_trained", "", "Epochs trained on, each target's.", lambda s: s.totals.trained),
    ("counter", "etude_epochs_skipped", "", "Epochs without data.", lambda s: s.totals.skipped),
    ("gauge", "etude_reward", "target", "Mean reward of the last epoch's episodes.", lambda s: s.rewards),
    (
        "gauge",
        "etude_validation_reward",
        "target",
        "Mean reward of the last validation.",
        lambda s: s.validation,
    ),
    (
        "gauge",
        "etude_phase_seconds",
        "phase",
        "For how long the run has been in this phase.",
        lambda s: {s.phase: s.phase_seconds},
    ),
    (
        "gauge",
        "etude_model_version",
        "model",
        "The version that is sampled from.",
        _of_models(lambda m: m.version),
    ),
    (
        "gauge",
        "etude_calls_in_flight",
        "model",
        "Calls that wait for an answer.",
        _of_models(lambda m: m.waiting),
    ),
    (
        "gauge",
        "etude_oldest_call_seconds",
        "model",
        "Age of the oldest of these calls.",
        _of_models(lambda m: m.oldest or 0.0),
    ),
    (
        "gauge",
        "etude_runners",
        "node state",
        "Processes that play episodes.",
        lambda s: Counter((each.node, each.state) for each in s.runners),
    ),
    ("counter", "etude_journal_entries", "", "Entries of the journal.", lambda s: s.journal.committed),
    ("gauge", "etude_journal_waiting", "", "Entries not on the disk yet.", lambda s: s.journal.waiting),
    ("gauge", "etude_status_seconds", "", "When these figures were so; Unix seconds.", lambda s: s.at),
)
"""The kind, name, labels (except the run), help text and values of each metric."""


class MetricsServer:
    """The latest status of a run, as a collector for a registry of Prometheus's client."""

    def __init__(self) -> None:
        self.status: RunStatus | None = None
        self.address = ""

    def collect(self) -> Iterator[Any]:
        """Yield the metrics; none before the first status."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        status = self.status
        for kind, name, labels, text, values in METRICS if status is not None else ():
            assert status is not None
            make = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            family, told = make(name, text, labels=["run", *labels.split()]), values(status)
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
