"""What ART's clients log: trajectories on disk, by split and step, as ART's own server keeps them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path

from etude.core.errors import StoreError
from etude.integrations.art.serving.bodies import ArtGroup, without_logprobs
from etude.store.files import draft_of


class ArtLog:
    """`art/<model>/<split>/<step>.jsonl` in the data folder, a group a line."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / "art"

    def write(self, model: str, split: str, step: int, groups: Iterable[ArtGroup]) -> None:
        """Keep the groups of a step, in place of those of an earlier try. Raises StoreError."""
        with draft_of(self._folder / model / split / f"{step:04d}.jsonl") as draft:
            draft.write_text("".join(map(without_logprobs, groups)), encoding="utf-8")

    def best_step(self, model: str, metric: str, alpha: float) -> int | None:
        """The step where a metric (`val/reward`) was highest; None where it was never logged.

        `alpha` is the weight of a step in the moving average (1: the step alone). Raises StoreError.
        """
        split, _, name = metric.partition("/")
        best: tuple[float, int] | None = None
        average = weight = 0.0
        for path in sorted(self._files(model, split)):
            values = _values(path, name)
            if not values:
                continue
            # Weights as of polars' ewm_mean, which ART takes.
            average = average * (1 - alpha) + math.fsum(values) / len(values)
            weight = weight * (1 - alpha) + 1
            best = max(best or (-math.inf, 0), (average / weight, int(path.stem)))
        return None if best is None else best[1]

    def _files(self, model: str, split: str) -> list[Path]:
        """Of a split that clients name: looked up, and never made part of a path."""
        return [path for path in (self._folder / model).glob("*/*.jsonl") if path.parent.name == split]


def _values(path: Path, name: str) -> list[float]:
    try:
        groups = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    trajectories = [one for group in groups for one in group["trajectories"]]
    found = [one["reward"] if name == "reward" else one["metrics"].get(name) for one in trajectories]
    return [float(value) for value in found if isinstance(value, int | float)]
