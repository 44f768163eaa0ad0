"""The metrics files of a run, written from its history after every epoch, so that no line repeats.

training_metrics.jsonl:   all metrics of every epoch, a line each, with the active alarms
reward_history.json:      the rewards of the epochs' episodes, and the results of each evaluator
validation_history.json:  the same on the validation examples
curriculum_state.json:    the curriculum after the last epoch, if there is one
reward_plot.png:          the rewards, drawn at the end; needs matplotlib, the extra `plots`
"""

import json
import warnings
from collections.abc import Callable, Iterable
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from etude.core.data_model import finite
from etude.core.errors import MissingExtraError, require_extra
from etude.core.history import Entry, EpochEntry, History
from etude.store.figures import with_rewards
from etude.store.files import open_draft, write_atomically

PLOT = "reward_plot.png"

_REWARDS = ["avg_reward", "min_reward", "max_reward", "reward_low", "reward_high", "num_scored", "evaluators"]


def write_metrics(
    history: History, folder: Path, final: bool = False, *, tell: Callable[[str], None] = lambda text: None
) -> None:
    """Bring the files in `folder` up to date. Each is always whole. Raises StoreError.

    If it is `final`, also draw the plot. `tell` gets the reason for a missing one.
    """
    epochs = history.epochs
    lines = []
    for entry in epochs:
        head = {"epoch": entry.epoch, "timestamp": entry.timestamp, "run_id": history.run_id}
        curriculum = entry.curriculum_state if _has_curriculum(entry) else None
        more = {"skipped": entry.skipped, "resting": entry.resting, "curriculum_state": curriculum}
        line = {**head, **entry.metrics, **head}  # A trainer may log its own count of epochs.
        line |= {key: value for key, value in more.items() if value is not None}
        lines.append(f"{_json(line | _alarms(entry))}\n")
    write_atomically(folder / "training_metrics.jsonl", "".join(lines))
    trained_on = [entry for entry in epochs if entry.resting is None]
    _write_list(folder / "reward_history.json", trained_on, "num_trajectories")
    if history.validations:
        held_out = folder / "validation_history.json"
        _write_list(held_out, history.validations, "num_examples", "num_unscored")
    if epochs and _has_curriculum(epochs[-1]):
        state = _json(epochs[-1].curriculum_state, indent=2)
        write_atomically(folder / "curriculum_state.json", f"{state}\n")
    if final:
        try:
            picture = render_reward_plot(history)
            with open_draft(folder / PLOT) as draft:
                draft.write_bytes(picture)
        except MissingExtraError as missing:
            tell(f"there is no {PLOT}: {missing}")


def _write_list(file: Path, entries: Iterable[Entry], *more: str) -> None:
    rows = []
    for entry in entries:
        metrics = {key: entry.metrics.get(key) for key in (*_REWARDS, *more)}
        rows.append({"epoch": entry.epoch, "timestamp": entry.timestamp, **metrics, **_alarms(entry)})
    write_atomically(file, f"{_json(rows, indent=2)}\n")


def _alarms(entry: Entry) -> dict[str, Any]:
    """Return the alarms of an entry; empty if there are none."""
    return {"alarms": [event.model_dump(mode="json") for event in entry.alarms]} if entry.alarms else {}


def _has_curriculum(entry: EpochEntry) -> bool:
    return bool(((entry.curriculum_state or {}).get("config") or {}).get("enabled"))


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def render_reward_plot(history: History) -> bytes:
    """Draw the rewards over the epochs, and return a PNG.

    The x axis counts the epochs that the weights had trained for. So the episodes of an epoch share their
    place with the validation before it. Raises MissingExtraError without matplotlib.
    """
    require_extra("matplotlib", "drawing the plot of the rewards", "plots")
    # Only drawing needs these imports. Without pyplot there is no global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots()
    # A `$` in a name is not a formula.
    axes.set_title("").set(text=" ".join(history.run_id.split()), parse_math=False)
    axes.set(xlabel="epochs trained", ylabel="reward")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", alpha=0.4)
    for label, entries in (("training", history.epochs), ("validation", history.validations)):
        if known := with_rewards(entries):
            places = [entry.epoch - isinstance(entry, EpochEntry) for entry in known]
            rewards = [entry.metrics["avg_reward"] for entry in known]
            bounds = [[entry.metrics.get(key) for entry in known] for key in ("reward_low", "reward_high")]
            lengths = None
            if None not in chain(*bounds):
                label += ", 95 % interval"
                lengths = [[abs(a - b) for a, b in zip(each, rewards, strict=True)] for each in bounds]
            axes.errorbar(places, rewards, yerr=lengths, marker="o", capsize=3, label=label)
            axes.legend()
    buffer = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About letters missing from its font, which appear as boxes.
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
