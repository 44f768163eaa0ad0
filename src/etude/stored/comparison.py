"""Runs side by side: what was set differently, and whether one did better."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config.document import KeyPath, dotted
from etude.core.stats import Estimate
from etude.rollout.encode import is_episode
from etude.store.journal import Journal
from etude.store.run_folder import RunFolder
from etude.stored.phases import phases_of
from etude.stored.stored_config import CONFIG, stored_data

_PLACES = (("finetuning", "output_dir"), ("finetuning", "run_configuration", "config_file"))
"""Keys that say where things are, and not what is done."""


def differing_settings(runs: Sequence[Path]) -> dict[str, list[Any]]:
    """The keys in which the runs' configs differ, with the value in each; None where a config lacks it."""
    settings = [dict(_leaves(stored_data(run))) if (run / CONFIG).is_file() else {} for run in runs]
    keys = dict.fromkeys(key for one in settings for key in one)
    values = {key: [one.get(key) for one in settings] for key in keys if key not in _PLACES}
    return {dotted(key): found for key, found in values.items() if any(value != found[0] for value in found)}


def paired_difference(first: Path, second: Path) -> Estimate | None:
    """By how much the second run's reward is higher, on the examples that both were measured on.

    Taken from each run's evaluation, or else its last validation. Paired by example, so that the
    examples' difficulty cancels out. None when the runs have fewer than two examples in common.
    """
    before, after = measured(first), measured(second)
    common = [name for name in before if name in after]
    if len(common) < 2:
        return None
    return _mean_of([after[name] - before[name] for name in common])


def measured(run: Path) -> dict[str, float]:
    """The mean reward of each example in a run's evaluation, or else its last validation."""
    reward = reward_name(run)
    with RunFolder.read(run) as folder:
        phases = [phase for phase in phases_of(folder.journal) if not phase.startswith("train/")]
        if reward is None or not phases:
            return {}
        return _means(folder.journal, phases[0], reward)


def _mean_of(differences: Sequence[float]) -> Estimate:
    """Mean and normal 95 % interval. `stats.estimate` would take differences of 0 and 1 for a proportion."""
    n = len(differences)
    mean = math.fsum(differences) / n
    variance = math.fsum((one - mean) ** 2 for one in differences) / (n - 1)
    half = 1.959964 * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n)


def _means(journal: Journal, phase: str, reward: str) -> dict[str, float]:
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for key, value in journal.scan(f"{phase}/"):
        if is_episode(value) and value["episode"] == key:
            told = journal.get(f"{key}/score/{reward}") or {}
            if told.get("score") is not None:
                scores[value["example"]["id"]].append(float(told["score"]))
    return {name: math.fsum(values) / len(values) for name, values in scores.items()}


def reward_name(run: Path) -> str | None:
    """The evaluator whose score is the reward in a run; None where there is no single one."""
    if not (run / CONFIG).is_file():
        return None
    finetuning = stored_data(run).get("finetuning") or {}
    return (finetuning.get("reward_function") or {}).get("name")


def _leaves(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, data
