"""Runs side by side: what was set differently, and whether one did better."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from etude.config.document import KeyPath, dotted
from etude.core.keys import content_hash
from etude.core.stats import Bounds, Estimate, estimate_difference, shared_bounds
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

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""In the text of a Python object that JSON cannot keep: it is another one in each process."""


class MeasuredExample(NamedTuple):
    """An example that a run was measured on."""

    id: str
    content: str
    """A hash of its inputs and its expected answer."""


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
    examples' difficulty cancels out; examples are the same when their inputs and expected answers are,
    whatever their ids. None when the runs have fewer than two examples in common. The scores are those of
    `evaluator`, by default the one that is the reward.
    """
    before, after = measured(first, evaluator), measured(second, evaluator)
    pairs = _pairs(before, after)
    if len(pairs) < 2:
        return None
    return estimate_difference(
        [before[one] for one, _ in pairs],
        [after[other] for _, other in pairs],
        _declared_bounds(first, second, evaluator),
    )


def other_inputs(first: Path, second: Path) -> int:
    """How many ids both runs were measured on, with other inputs or another expected answer in each."""
    before, after = measured(first), measured(second)
    paired = {each.id for pair in _pairs(before, after) for each in pair}
    return len(({each.id for each in before} & {each.id for each in after}) - paired)


def _pairs(
    before: Mapping[MeasuredExample, float], after: Mapping[MeasuredExample, float]
) -> list[tuple[MeasuredExample, MeasuredExample]]:
    """The examples that are the same: by content, and by id too where a run has several of one content."""
    own, others = _by_content(before), _by_content(after)
    pairs = []
    for each in before:
        other = each if each in after else others.get(each.content)
        if other is not None and (other == each or own[each.content] is not None):
            pairs.append((each, other))
    return pairs


def _by_content(examples: Iterable[MeasuredExample]) -> dict[str, MeasuredExample | None]:
    """The example of each content; None where there are several."""
    found: dict[str, MeasuredExample | None] = {}
    for each in examples:
        found[each.content] = None if each.content in found else each
    return found


def measured(run: Path, evaluator: str | None = None) -> dict[MeasuredExample, float]:
    """The mean score of each example in a run's evaluation, or else its last validation.

    The scores are those of `evaluator`, by default the one that is the reward.
    """
    scores: defaultdict[MeasuredExample, list[float]] = defaultdict(list)
    for example, stored in _stored_scores(run, evaluator):
        scores[example].append(float(stored["score"]))
    return {example: math.fsum(values) / len(values) for example, values in scores.items()}


def _declared_bounds(first: Path, second: Path, evaluator: str | None) -> Bounds | None:
    """The bounds that an evaluator declared of all its scores in both runs; None where it did not."""
    scores = [stored for run in (first, second) for _, stored in _stored_scores(run, evaluator)]
    return shared_bounds(stored.get("bounds") for stored in scores)


def _stored_scores(run: Path, evaluator: str | None) -> Iterator[tuple[MeasuredExample, Mapping[str, Any]]]:
    """The examples of a run's evaluation, or else its last validation, and their stored scores."""
    evaluator = evaluator or reward_name(stored_data(run, required=False))
    with RunFolder.read(run) as folder:
        phases = [
            phase for phase in phases_in(folder.journal) if not phase.startswith(("train/", "warm-up/"))
        ]
        for key, data in stored_episodes(folder.journal, f"{phases[0]}/") if phases and evaluator else ():
            stored = folder.journal.get(f"{key}/score/{evaluator}") or {}
            if stored.get("score") is not None:
                row = data["example"]
                content = _ADDRESS.sub("", json.dumps([row["inputs"], row["expected"]], sort_keys=True))
                yield MeasuredExample(row["id"], content_hash(content)), stored


def _leaves(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    if isinstance(data, Mapping) and data:
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, data
