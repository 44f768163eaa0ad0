"""Runs side by side: what was set differently, and whether one did better."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from etude.config.document import KeyPath, dotted
from etude.core.stats import Estimate, estimate_difference
from etude.store.episodes import stored_episodes
from etude.store.outline import phases_in
from etude.store.run_folder import RunFolder
from etude.store.stored_config import (
    evaluated_model,
    evaluators_of,
    read_request,
    reward_name,
    stored_data,
    trained_parts,
)

_LOCATIONS = (("finetuning", "output_dir"), ("finetuning", "run_configuration", "config_file"))
"""Keys that say where files are, and not what is done with them."""


def differing_settings(runs: Sequence[Path]) -> dict[str, list[Any]]:
    """The keys in which the runs' configs differ, with the value in each; None where a config lacks it.

    Of evaluations also what `etude evaluate` was asked for, under `evaluate`: the model, how many episodes
    for each example, and whether it was greedy.
    """
    settings = [dict(_leaves(_settings_of(run))) for run in runs]
    keys = dict.fromkeys(key for setting in settings for key in setting if key not in _LOCATIONS)
    values = {key: [setting.get(key) for setting in settings] for key in keys}
    return {dotted(key): each for key, each in values.items() if any(value != each[0] for value in each)}


def _settings_of(run: Path) -> dict[str, Any]:
    data, request = stored_data(run, required=False), read_request(run)
    if request is None:
        return data
    model = evaluated_model(request, trained_parts(data)["base"])
    return {"evaluate": {"model": model, "repeat": request.repeat, "greedy": request.greedy}, **data}


def paired_differences(first: Path, second: Path) -> dict[str, Estimate]:
    """By how much the second run's scores are higher, for each evaluator that is not the reward.

    As `paired_difference`; without the evaluators that the runs do not both have.
    """
    configs = [stored_data(run, required=False) for run in (first, second)]
    rewards = [reward_name(data) for data in configs]
    before, after = map(evaluators_of, configs)
    common = [name for name in before if name in after and name not in rewards]
    differences = {name: paired_difference(first, second, name) for name in common}
    return {name: difference for name, difference in differences.items() if difference is not None}


def paired_difference(first: Path, second: Path, evaluator: str | None = None) -> Estimate | None:
    """By how much the second run's scores are higher, on the examples that both were measured on.

    Taken from each run's evaluation, or else its last validation. Paired by example, so that the
    examples' difficulty cancels out. None when the runs have fewer than two examples in common. The
    scores are those of `evaluator`, by default the one that is the reward.
    """
    before, after = measured(first, evaluator), measured(second, evaluator)
    common = [name for name in before if name in after]
    if len(common) < 2:
        return None
    return estimate_difference([before[name] for name in common], [after[name] for name in common])


def measured(run: Path, evaluator: str | None = None) -> dict[str, float]:
    """The mean score of each example in a run's evaluation, or else its last validation.

    The scores are those of `evaluator`, by default the one that is the reward.
    """
    evaluator = evaluator or reward_name(stored_data(run, required=False))
    scores: defaultdict[str, list[float]] = defaultdict(list)
    with RunFolder.read(run) as folder:
        phases = [phase for phase in phases_in(folder.journal) if not phase.startswith("train/")]
        for key, data in stored_episodes(folder.journal, f"{phases[0]}/") if phases and evaluator else ():
            score = (folder.journal.get(f"{key}/score/{evaluator}") or {}).get("score")
            if score is not None:
                scores[data["example"]["id"]].append(float(score))
    return {example: math.fsum(values) / len(values) for example, values in scores.items()}


def _leaves(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, data
