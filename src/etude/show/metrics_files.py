"""The metrics files of a run, written from its history after every epoch, so that no line repeats.

training_metrics.jsonl:   all metrics of every epoch, a line each, with the active alarms
reward_history.json:      the rewards of the epochs' episodes, and the results of each evaluator
validation_history.json:  the same on the validation examples
curriculum_state.json:    the curriculum after the last epoch, if there is one
reward_plot.png:          the rewards, drawn now and then and at the end; needs matplotlib, the extra `plots`
"""

from __future__ import annotations

import json
import textwrap
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from etude.core.data_model import finite
from etude.core.errors import MissingExtraError, require_extra
from etude.core.history import Entry, EpochEntry, History
from etude.core.secrets import masked
from etude.store.figures import with_rewards
from etude.store.files import open_draft, write_atomically

_INK, _MUTED, _GRID = "#22262e", "#7a8290", "#e6e8ec"
_TRAIN, _VALIDATION, _FILTERED = "#4c78a8", "#e4572e", "#59a14f"

Points = list[tuple[float, float]]

E = TypeVar("E", bound=Entry)

PLOT = "reward_plot.png"

_REWARDS = ["avg_reward", "min_reward", "max_reward", "reward_low", "reward_high", "num_scored", "evaluators"]


class RunReport:
    """A writer of the metrics files at each call, and of the plot now and then and at the end.

    A run may have thousands of epochs, so each is encoded only once.
    """

    def __init__(
        self,
        seconds_between_plots: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Drawing takes about a second of CPU, so it is rare. `tell` gets the reason for a missing plot."""
        self._between = seconds_between_plots
        self._clock = clock
        self._tell = tell
        self._drawn_at = clock()
        self._texts: dict[tuple[Path, int], tuple[Entry, str]] = {}

    def __call__(self, history: History, folder: Path, final: bool = False) -> None:
        """Bring the files in `folder` up to date. Each is always whole. Raises StoreError."""
        file = folder / "training_metrics.jsonl"
        lines = self._entry_texts(
            file, history.epochs, lambda each: f"{_json(_epoch_line(history.run_id, each))}\n"
        )
        write_atomically(file, "".join(lines), exact=True)
        trained_on = [entry for entry in history.epochs if entry.resting is None]
        self._write_list(folder / "reward_history.json", trained_on, "num_trajectories")
        if history.validations:
            held_out = folder / "validation_history.json"
            self._write_list(held_out, history.validations, "num_examples", "num_unscored")
        if history.epochs and _has_curriculum(history.epochs[-1]):
            state = _json(history.epochs[-1].curriculum_state, indent=2)
            write_atomically(folder / "curriculum_state.json", f"{state}\n")
        if final or self._clock() - self._drawn_at >= self._between:
            self._drawn_at = self._clock()
            try:
                picture = render_reward_plot(history)
                with open_draft(folder / PLOT) as draft:
                    draft.write_bytes(picture)
            except MissingExtraError as missing:
                if final:
                    self._tell(f"there is no {PLOT}: {missing}")

    def _write_list(self, file: Path, entries: Iterable[Entry], *more: str) -> None:
        items = self._entry_texts(
            file, entries, lambda entry: textwrap.indent(_json(_rewards(entry, more), indent=2), "  ")
        )
        text = ",\n".join(items)
        write_atomically(file, f"[\n{text}\n]\n" if text else "[]\n", exact=True)

    def _entry_texts(self, file: Path, entries: Iterable[E], encode: Callable[[E], str]) -> Iterable[str]:
        """Yield the text of each entry in one of the files."""
        for entry in entries:
            known = self._texts.get((file, entry.epoch))
            # Entries are frozen, so a changed entry is a new object.
            if known is None or known[0] is not entry:
                known = self._texts[file, entry.epoch] = entry, masked(encode(entry))
            yield known[1]


def _epoch_line(run_id: str, entry: EpochEntry) -> dict[str, Any]:
    head = {"epoch": entry.epoch, "timestamp": entry.timestamp, "run_id": run_id}
    curriculum = entry.curriculum_state if _has_curriculum(entry) else None
    more = {"skipped": entry.skipped, "resting": entry.resting, "curriculum_state": curriculum}
    line = {**head, **entry.metrics, **head}  # A trainer may log its own count of epochs.
    return line | {key: value for key, value in more.items() if value is not None} | _alarms(entry)


def _rewards(entry: Entry, more: Iterable[str]) -> dict[str, Any]:
    metrics = {key: entry.metrics.get(key) for key in (*_REWARDS, *more)}
    return {"epoch": entry.epoch, "timestamp": entry.timestamp, **metrics, **_alarms(entry)}


def _alarms(entry: Entry) -> dict[str, Any]:
    """Return the alarms of an entry, and the version that the run went back to; empty without either."""
    line: dict[str, Any] = {}
    if entry.alarms:
        line["alarms"] = [event.model_dump(mode="json") for event in entry.alarms]
    if entry.back_to is not None:
        line["back_to"] = entry.back_to.number
    return line


def _has_curriculum(entry: EpochEntry) -> bool:
    return bool(((entry.curriculum_state or {}).get("config") or {}).get("enabled"))


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def render_reward_plot(history: History) -> bytes:
    """Draw the rewards over the epochs, and return a PNG of 1500 by 840 pixels.

    The x axis counts the epochs that the weights had trained for. So the episodes of an epoch share their
    place with the validation before it. Raises MissingExtraError without matplotlib.
    """
    require_extra("matplotlib", "drawing the plot of the rewards", "plots")
    # Only drawing needs these imports. Without pyplot there is no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 5.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    title = axes.set_title("", loc="left", color=_INK, fontsize=13, fontweight="bold", pad=14)
    title.set(text=_title(history), parse_math=False)  # A `$` in a name is not a formula.
    axes.set_xlabel("epochs trained", color=_MUTED)
    axes.set_ylabel("reward", color=_MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.margins(x=0.02, y=0.12)
    train = _points(history.epochs, "avg_reward")
    if train:
        style = {"linewidth": 1.6, "marker": "o", "markersize": 3.2, "label": "training"}
        axes.plot(*zip(*train, strict=True), color=_TRAIN, **style)
    filtered = _points(history.epochs, "filtered_avg_reward")
    if filtered and any(share != 1.0 for _, share in _points(history.epochs, "curriculum_percentile")):
        style = {"linewidth": 1.4, "linestyle": (0, (1, 1.6)), "label": "trained on"}
        axes.plot(*zip(*filtered, strict=True), color=_FILTERED, **style)
    _draw_validation(axes, history)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, labelcolor=_INK, fontsize=9.5)
    else:
        axes.text(0.5, 0.5, "no rewards yet", transform=axes.transAxes, ha="center", color=_MUTED)
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About letters missing from its font, which appear as boxes.
        figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _title(history: History) -> str:
    name = " ".join(history.run_id.split())
    known = with_rewards(history.validations or history.epochs)
    if len(known) < 2:
        return f"Reward · {name}"
    kind = "Validation reward" if history.validations else "Reward of the training episodes"
    first, last = (entry.metrics["avg_reward"] for entry in (known[0], known[-1]))
    return f"{kind} {first:.2f} → {last:.2f} · {name}"


def _draw_validation(axes: Any, history: History) -> None:
    known = with_rewards(history.validations)
    points = _points(known, "avg_reward")
    if not points:
        return
    ends = [_points(known, key) for key in ("reward_low", "reward_high")]
    lengths, label = None, "validation"
    if all(len(bounds) == len(points) for bounds in ends):
        label = "validation, 95 % interval"
        lengths = [[abs(a[1] - b[1]) for a, b in zip(bounds, points, strict=True)] for bounds in ends]
    # The line between validations measures nothing, so it is faint.
    axes.plot(*zip(*points, strict=True), color=_VALIDATION, linewidth=1.2, linestyle=":", alpha=0.6)
    style = {"fmt": "o", "markersize": 6, "elinewidth": 2.2, "capsize": 4, "zorder": 5, "label": label}
    axes.errorbar(*zip(*points, strict=True), yerr=lengths, color=_VALIDATION, **style)
    for point in {points[0], points[-1]}:
        offset = {"xytext": (9, -15), "textcoords": "offset points"}
        axes.annotate(f"{point[1]:.2f}", point, color=_VALIDATION, fontsize=10, fontweight="bold", **offset)


def _points(entries: Sequence[Entry], key: str) -> Points:
    """Return the values of a metric by the number of epochs that the weights had trained for."""
    return [
        (float(entry.epoch - isinstance(entry, EpochEntry)), float(value))
        for entry in entries
        if (value := entry.metrics.get(key)) is not None
    ]
