"""The reward plot: one picture of what a run has learnt. Drawing needs matplotlib, the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any

from etude.core.errors import MissingExtraError
from etude.core.history import EpochEntry, History, ValidationEntry
from etude.store.figures import with_rewards
from etude.store.files import draft_of

_INK, _MUTED, _GRID = "#22262e", "#7a8290", "#e6e8ec"
_HEIGHT, _HEIGHT_BELOW = 5.6, 1.7
"""Inches of the plot of the rewards, and of one of an evaluator below it."""
_TRAIN, _VALIDATION, _FILTERED, _CURRICULUM = "#4c78a8", "#e4572e", "#59a14f", "#b07aa1"
_DEFAULT = "DejaVu Sans"
"""Comes with matplotlib."""
_NO_FONT = "Last Resort"
"""In the name of a font that has a box for every character."""
_MISSING = "\u25a1"
"""Stands for a character that no font here has."""

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
    """The plot as the bytes of a PNG, 1500 by 840 pixels.

    Below the rewards, the means of the evaluators have a smaller plot each, where there are several; the
    picture is higher for those.
    """
    if find_spec("matplotlib") is None:
        raise MissingExtraError("drawing the plot of the rewards", "plots")
    # Imported here, because drawing is the only thing that needs it; no pyplot, so no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = _evaluators_of(history)
    below = names if len(names) > 1 else []
    heights = [_HEIGHT, *([_HEIGHT_BELOW] * len(below))]
    figure = Figure(figsize=(10, sum(heights)), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes, *others = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    title = axes.set_title("", loc="left", color=_INK, fontsize=13, fontweight="bold", pad=14)
    title.set(**_label_text(_title(history)))
    axes.set_ylabel("reward", color=_MUTED)
    _style(axes)
    _draw_curriculum(axes, history)
    _draw_training(axes, history)
    _draw_validation(axes, history)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best", frameon=False, labelcolor=_INK, fontsize=9.5)
    else:
        axes.text(0.5, 0.5, "no rewards yet", transform=axes.transAxes, ha="center", color=_MUTED)
    for name, panel in zip(below, others, strict=True):
        _draw_evaluator(panel, history, name)
    (others[-1] if others else axes).set_xlabel("epochs trained", color=_MUTED)
    buffer = BytesIO()
    figure.savefig(buffer, format="png", metadata={"Comment": _origin(history)})
    return buffer.getvalue()


def _style(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color=_GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID)
    axes.margins(x=0.02, y=0.12)


def _title(history: History) -> str:
    known = with_rewards(history.validations or history.epochs)
    if len(known) < 2:
        return f"Reward · {history.run_id}"
    kind = "Validation reward" if history.validations else "Reward of the training episodes"
    first, last = (entry.metrics["avg_reward"] for entry in (known[0], known[-1]))
    return f"{kind} {first:.2f} → {last:.2f} · {history.run_id}"


def _draw_training(axes: Any, history: History) -> None:
    train = _points(history.epochs, "avg_reward")
    if train:
        style = {"linewidth": 1.6, "marker": "o", "markersize": 3.2, "label": "training"}
        axes.plot(*zip(*train, strict=True), color=_TRAIN, **style)
    filtered = _points(history.epochs, "filtered_avg_reward")
    if filtered and _has_curriculum(history):
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


def _evaluators_of(history: History) -> list[str]:
    """The evaluators that have measured anything, in the order in which they are first seen."""
    entries: list[Any] = [*history.validations, *history.epochs]
    return list(dict.fromkeys(name for entry in entries for name in entry.metrics.get("evaluators") or {}))


def _draw_evaluator(axes: Any, history: History, name: str) -> None:
    """The means of one evaluator with their intervals, in training and in validation."""
    _style(axes)
    axes.set_ylabel("", color=_MUTED).set(**_label_text(name))
    for entries, colour in ((history.epochs, _TRAIN), (history.validations, _VALIDATION)):
        scores = [
            (_epochs_before(entry), score["mean"], score["low"], score["high"])
            for entry in entries
            if (score := (entry.metrics.get("evaluators") or {}).get(name)) and score["mean"] is not None
        ]
        if scores:
            epochs, means = zip(*(score[:2] for score in scores), strict=True)
            axes.plot(epochs, means, color=colour, linewidth=1.2, marker="o", markersize=3.2)
        for epoch, _, low, high in scores:
            if low is not None and high is not None:
                axes.vlines(epoch, low, high, color=colour, alpha=0.4, linewidth=1.6)


def _draw_curriculum(axes: Any, history: History) -> None:
    """The share of groups that the curriculum lets through, as steps on an axis of its own."""
    if not _has_curriculum(history):
        return
    points = _points(history.epochs, "curriculum_percentile")
    shares = axes.twinx()
    epochs, values = zip(*[(epoch, share * 100) for epoch, share in points], strict=True)
    shares.fill_between(epochs, values, step="mid", color=_CURRICULUM, alpha=0.10, linewidth=0)
    shares.step(epochs, values, where="mid", color=_CURRICULUM, linewidth=1.0, alpha=0.6)
    shares.set_ylim(0, 105)
    shares.set_ylabel("groups in the curriculum, %", color=_CURRICULUM)
    shares.tick_params(colors=_CURRICULUM, length=0)
    for spine in shares.spines.values():
        spine.set_visible(False)
    axes.set_zorder(shares.get_zorder() + 1)
    axes.patch.set_visible(False)


def _has_curriculum(history: History) -> bool:
    return any(share != 1.0 for _, share in _points(history.epochs, "curriculum_percentile"))


def _points(entries: Sequence[Any], key: str) -> Points:
    values = [(_epochs_before(entry), entry.metrics.get(key)) for entry in entries]
    return [(epochs, float(value)) for epochs, value in values if value is not None]


def _epochs_before(entry: EpochEntry | ValidationEntry) -> float:
    """How many epochs the weights had trained for that an entry is a figure of."""
    return float(entry.epoch - 1 if isinstance(entry, EpochEntry) else entry.epoch)


def _label_text(text: str) -> dict[str, Any]:
    """`text` as keywords of matplotlib's functions for text, with the font families to draw it with.

    A character that no installed font has becomes a square. A `$` in a name is no formula.
    """
    from matplotlib.font_manager import findfont

    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    missing, families = set(printable) - _letters(findfont(_DEFAULT)), [_DEFAULT]
    if missing:
        family, letters = _best_font(frozenset(missing))
        families += [family] if letters else []
        missing -= letters
    shown = "".join(_MISSING if letter in missing else letter for letter in printable)
    # Other fonts are asked for in the one weight that all of them have.
    weight = {"fontweight": "normal"} if len(families) > 1 else {}
    return {"text": shown, "fontfamily": families, "parse_math": False, **weight}


@cache
def _best_font(missing: frozenset[str]) -> tuple[str, frozenset[str]]:
    """The installed font that has the most of the letters, and which of them."""
    from matplotlib.font_manager import fontManager

    best: tuple[str, frozenset[str]] = _DEFAULT, frozenset()
    for font in fontManager.ttflist:
        if font.style != "normal" or font.weight not in (400, "normal", "regular") or _NO_FONT in font.name:
            continue
        try:
            known = _letters(font.fname) & missing
        except (OSError, RuntimeError):
            continue  # A font that was removed, or that FreeType cannot read, is no font to draw with.
        if len(known) > len(best[1]):
            best = font.name, known
        if known == missing:
            break
    return best


@cache
def _letters(file: str) -> frozenset[str]:
    from matplotlib.ft2font import FT2Font

    return frozenset(map(chr, FT2Font(file).get_charmap()))
