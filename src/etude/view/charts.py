"""Charts of runs, as data: the columns that the page draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from etude.budget.bill import Bill
from etude.core.episode import cut_off_share
from etude.core.history import Entry, EpochEntry, History
from etude.store.episodes import epoch_of

Value: TypeAlias = float | None
Bounds: TypeAlias = tuple[Value, Value, Value]
"""A number and its interval, which need not be known."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: a number for each x, and its interval where there is one."""

    label: str
    values: list[Value]
    low: list[Value] | None = None
    high: list[Value] | None = None
    is_dotted: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart over epochs."""

    title: str
    x: list[int]
    lines: list[Line] = field(default_factory=list)
    note: str = ""

    @property
    def in_words(self) -> str:
        """The chart in words, for whoever does not see it."""
        ends = [
            f"{line.label}: {known[0]:.4g} to {known[-1]:.4g}"
            for line in self.lines
            if (known := [value for value in line.values if value is not None])
        ]
        return f"{self.title} over epochs. " + "; ".join(ends)

    def as_json(self) -> dict[str, Any]:
        """For the script that draws it."""
        return asdict(self)


@dataclass(slots=True)
class Group:
    """Charts of one kind."""

    charts: list[Chart] = field(default_factory=list)
    zero: list[str] = field(default_factory=list)
    """Titles of charts that would be zero throughout, and are not drawn."""

    def add(self, chart: Chart) -> None:
        """Take in a chart, or its title where drawing it would show nothing more."""
        if not any(value for line in chart.lines for value in line.values):
            self.zero.append(chart.title)
        else:
            self.charts.append(chart)


def charts_of(history: History, bill: Bill) -> dict[str, Group]:
    """All charts that have anything to draw, under the names of their groups."""
    groups: dict[str, list[Chart | None]] = {
        "Rewards": [_rewards(history), *(_evaluator(history, name) for name in _evaluators(history))],
        "Learning": [_metric(history, *each) for each in _LEARNING],
        "Sampling": [_metric(history, *each) for each in _SAMPLING],
        "Failures": _failures(history),
        "Speed and cost": [_metric(history, *each) for each in _SPEED] + [_cost(history, bill)],
    }
    drawn: dict[str, Group] = {}
    for name, charts in groups.items():
        for chart in charts:
            if chart is not None:
                drawn.setdefault(name, Group()).add(chart)
    return drawn


def _trained(name: str) -> Callable[[EpochEntry], Value]:
    """A metric of the training job."""
    return _number(lambda entry: (entry.metrics.get("training") or {}).get(name))


def _of(name: str) -> Callable[[EpochEntry], Value]:
    return _number(lambda entry: entry.metrics.get(name))


def _number(metric: Callable[[EpochEntry], Any]) -> Callable[[EpochEntry], Value]:
    """Metrics may be whatever a user's adapter gives; numbers are drawn."""

    def number(entry: EpochEntry) -> Value:
        value = metric(entry)
        return float(value) if isinstance(value, int | float) else None

    return number


def _share(name: str, of: str) -> Callable[[EpochEntry], Value]:
    def share(entry: EpochEntry) -> Value:
        part, whole = entry.metrics.get(name), entry.metrics.get(of)
        return None if part is None or not whole else float(part) / whole

    return share


def _staleness(entry: EpochEntry) -> Value:
    """By how many updates the weights that sampled were behind those that learned, on average."""
    versions = {int(number): count for number, count in (entry.metrics.get("model_versions") or {}).items()}
    if entry.status is None or entry.version is None or not versions:
        return None
    sampled = sum(number * count for number, count in versions.items()) / sum(versions.values())
    return float(max(0.0, entry.version.number - 1 - sampled))


_LEARNING: tuple[tuple[str, Callable[[EpochEntry], Value], str], ...] = (
    ("loss", _trained("loss"), "of the job's steps, on average"),
    ("KL to the reference", _trained("reference_kl"), "nats per token"),
    ("KL to the sampler", _trained("sampled_kl"), "nats per token, over the job's steps"),
    ("mismatch", _trained("mismatch_kl"), "learner against engine before the first step; nats per token"),
    ("entropy in training", _trained("entropy"), "nats per token"),
    ("clipped share", _trained("clip_fraction"), "of the trained tokens"),
    ("gradient norm", _trained("grad_norm"), "before clipping"),
    ("learning rate", _trained("learning_rate"), ""),
    ("accuracy", _trained("accuracy"), "of preferences"),
)
_SAMPLING: tuple[tuple[str, Callable[[EpochEntry], Value], str], ...] = (
    ("entropy", _of("sampled_entropy"), "nats per sampled token"),
    ("length of answers", _of("answer_tokens"), "tokens"),
    ("cut off", lambda entry: cut_off_share(entry.metrics.get("calls") or {}), "share of the answers"),
    ("repeated", _of("repeated_share"), "share of the outputs that a sibling has too"),
    ("drift", _share("drifted", "branches"), "share of the branches that a template began"),
    ("staleness", _staleness, "updates between the weights that sampled and those that learned"),
    ("trained on", _of("filtered_trajectories"), "trajectories"),
)
_SPEED: tuple[tuple[str, Callable[[EpochEntry], Value], str], ...] = (
    ("sampled tokens per second", _share("completion_tokens", "collecting_seconds"), ""),
    ("trained tokens per second", _trained("tokens_per_s"), ""),
    ("seconds of collecting", _of("collecting_seconds"), ""),
    ("seconds of training", _of("training_seconds"), ""),
)


def _metric(history: History, title: str, value: Callable[[EpochEntry], Value], note: str) -> Chart | None:
    line = _line(title, _epochs(history), {entry.epoch: value(entry) for entry in history.epochs})
    return _chart(title, _epochs(history), [line], note)


def _rewards(history: History) -> Chart | None:
    def bounds(entry: Entry) -> Bounds:
        metrics = entry.metrics
        return metrics.get("avg_reward"), metrics.get("reward_low"), metrics.get("reward_high")

    return _measured(history, "reward", bounds)


def _evaluator(history: History, name: str) -> Chart | None:
    def bounds(entry: Entry) -> Bounds:
        score: Mapping[str, Any] = (entry.metrics.get("evaluators") or {}).get(name) or {}
        return score.get("mean"), score.get("low"), score.get("high")

    return _measured(history, name, bounds)


def _measured(history: History, title: str, bounds: Callable[[Entry], Bounds]) -> Chart | None:
    """Training episodes stand over the epochs that the weights had trained for, beside the validations."""
    x = _epochs(history)
    of_epochs = {entry.epoch - 1: bounds(entry) for entry in history.epochs if not entry.resting}
    of_validations = {entry.epoch: bounds(entry) for entry in history.validations}
    lines = [_banded("training", x, of_epochs, is_dotted=bool(of_validations))]
    return _chart(title, x, [*lines, _banded("validation", x, of_validations)], "with 95 % intervals")


def _failures(history: History) -> list[Chart | None]:
    x = _epochs(history)
    counts = {entry.epoch: entry.metrics.get("failures") or {} for entry in history.epochs}
    kinds = sorted({kind for each in counts.values() for kind in each})
    lines = [_line(kind, x, {epoch: each.get(kind, 0) for epoch, each in counts.items()}) for kind in kinds]
    retried = {entry.epoch: (entry.metrics.get("calls") or {}).get("retries") for entry in history.epochs}
    return [
        _chart("failures by cause", x, lines, "episodes, and scores"),
        _chart("calls made again", x, [_line("retries", x, retried)], "") if any(retried.values()) else None,
    ]


def _cost(history: History, bill: Bill) -> Chart | None:
    x, usd = _epochs(history), dict[int, Value]()
    for line in bill.by("phase"):
        epoch = epoch_of(line.phase)
        if epoch is not None and line.usd:
            usd[epoch + 1] = (usd.get(epoch + 1) or 0.0) + line.usd
    return _chart("cost of sampling", x, [_line("US dollars", x, usd)], "US dollars an epoch")


def _evaluators(history: History) -> list[str]:
    """The evaluators; none where there is only the one that is the reward."""
    found = (name for entry in history.entries for name in entry.metrics.get("evaluators") or {})
    names = list(dict.fromkeys(found))
    return names if len(names) > 1 else []


def _epochs(history: History) -> list[int]:
    return list(range(max((entry.epoch for entry in history.entries), default=0) + 1))


def _line(label: str, x: Sequence[int], values: Mapping[int, Value]) -> Line:
    return Line(label, [values.get(epoch) for epoch in x])


def _banded(label: str, x: Sequence[int], bounds: Mapping[int, Bounds], *, is_dotted: bool = False) -> Line:
    values, low, high = ([bounds.get(epoch, (None, None, None))[part] for epoch in x] for part in range(3))
    has_bounds = any(value is not None for value in low)
    return Line(label, values, low if has_bounds else None, high if has_bounds else None, is_dotted)


def _chart(title: str, x: list[int], lines: Sequence[Line], note: str) -> Chart | None:
    drawn = [line for line in lines if any(value is not None for value in line.values)]
    return Chart(title, x, drawn, note) if drawn else None
