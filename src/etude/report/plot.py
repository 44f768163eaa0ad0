"""The reward plot: one picture of what a run has learnt. Drawing needs matplotlib, the extra `plots`."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from etude.core.errors import MissingExtraError
from etude.core.history import Entry, EpochEntry, History
from etude.store.figures import with_rewards
from etude.store.files import draft_of

_INK, _MUTED, _GRID = "#22262e", "#7a8290", "#e6e8ec"
_TRAIN, _VALIDATION, _FILTERED = "#4c78a8", "#e4572e", "#59a14f"

Points = list[tuple[float, float]]


def write_reward_plot(history: History, path: Path) -> None:
    """Draw the rewards over the epochs as a PNG.

    A picture of the same history that is there already stays: to draw one takes a second of CPU time.
    Raises StoreError when it cannot be written, MissingExtraError without matplotlib.

    The x axis counts the epochs that the weights had trained for, so that the episodes of an epoch and
    the validation before it stand above each other.
    """
    if path.is_file() and _origin(history).encode() in path.read_bytes():
        return
    picture = render_reward_plot(history)
    with draft_of(path) as draft:
        draft.write_bytes(picture)


def _origin(history: History) -> str:
    """The words in a picture that say what it shows."""
    return f"history {sha256(history.model_dump_json().encode()).hexdigest()}"


def render_reward_plot(history: History) -> bytes:
    """The plot as the bytes of a PNG, 1500 by 840 pixels."""
    if find_spec("matplotlib") is None:
        raise MissingExtraError("drawing the plot of the rewards", "plots")
    # Imported here, because drawing is the only thing that needs it; no pyplot, so no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 5.6), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    title = axes.set_title("", loc="left", color=_INK, fontsize=13, fontweight="bold", pad=14)
    title.set(text=_title(history), parse_math=False)  # A `$` in a name is no formula.
    axes.set_xlabel("epochs trained", color=_MUTED)
    axes.set_ylabel("reward", color=_MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.margins(x=0.02, y=0.12)
    _draw_training(axes, history)
    _draw_validation(axes, history)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, labelcolor=_INK, fontsize=9.5)
    else:
        axes.text(0.5, 0.5, "no rewards yet", transform=axes.transAxes, ha="center", color=_MUTED)
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of letters that its font lacks: they are boxes.
        figure.savefig(buffer, format="png", metadata={"Comment": _origin(history)})
    return buffer.getvalue()


def _title(history: History) -> str:
    name = " ".join(history.run_id.split())
    known = with_rewards(history.validations or history.epochs)
    if len(known) < 2:
        return f"Reward · {name}"
    kind = "Validation reward" if history.validations else "Reward of the training episodes"
    first, last = (entry.metrics["avg_reward"] for entry in (known[0], known[-1]))
    return f"{kind} {first:.2f} → {last:.2f} · {name}"


def _draw_training(axes: Any, history: History) -> None:
    train = _points(history.epochs, "avg_reward")
    if train:
        style = {"linewidth": 1.6, "marker": "o", "markersize": 3.2, "label": "training"}
        axes.plot(*zip(*train, strict=True), color=_TRAIN, **style)
    filtered = _points(history.epochs, "filtered_avg_reward")
    if filtered and any(share != 1.0 for _, share in _points(history.epochs, "curriculum_percentile")):
        style = {"linewidth": 1.4, "linestyle": (0, (1, 1.6)), "label": "trained on"}
        axes.plot(*zip(*filtered, strict=True), color=_FILTERED, **style)


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
    # A line from one validation to the next is no measurement, so it is a faint one.
    axes.plot(*zip(*points, strict=True), color=_VALIDATION, linewidth=1.2, linestyle=":", alpha=0.6)
    style = {"fmt": "o", "markersize": 6, "elinewidth": 2.2, "capsize": 4, "zorder": 5, "label": label}
    axes.errorbar(*zip(*points, strict=True), yerr=lengths, color=_VALIDATION, **style)
    for point in {points[0], points[-1]}:
        offset = {"xytext": (9, -15), "textcoords": "offset points"}
        axes.annotate(f"{point[1]:.2f}", point, color=_VALIDATION, fontsize=10, fontweight="bold", **offset)


def _points(entries: Sequence[Entry], key: str) -> Points:
    """By the epochs that the weights had trained for that an entry is a figure of."""
    return [
        (float(entry.epoch - isinstance(entry, EpochEntry)), float(value))
        for entry in entries
        if (value := entry.metrics.get(key)) is not None
    ]
