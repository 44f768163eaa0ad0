"""The curriculum: train on the easiest groups first, and then on more of them.

It is a pure function with a JSON state. Groups whose rewards hardly differ teach nothing and are left out.
The rest are sorted by average reward, and the first share of them, the current percentile, is trained on. The
share grows after `expansion_interval` epochs have trained at it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from etude.config.finetuning import CurriculumLearningConfig
from etude.core.keys import generator
from etude.core.sample import GroupFigures

State = dict[str, Any]
"""`current_percentile`, `epochs_at_percentile`, `last_expansion_epoch` (-1: never), `total_groups` (with
enough difference, in the last epoch) and `included_groups` (ids of the groups last trained on)."""

Selection = dict[int, Sequence[int]]
"""The indices of the groups to train on, in order, each with the indices of its units."""

_ROUNDING = 1e-9
"""Tolerates rounding: 10 groups at 0.1 + 0.2 are 3 groups, not 4."""


def initial_state(config: CurriculumLearningConfig) -> State:
    """Return the state before the first epoch."""
    return {
        "current_percentile": config.initial_percentile,
        "epochs_at_percentile": 0,
        "last_expansion_epoch": -1,
        "total_groups": 0,
        "included_groups": [],
    }


def with_sets(state: State) -> dict[str, Any]:
    """Return the state as trainers hold it: `included_groups` is a set."""
    return {key: set(value) if key == "included_groups" else value for key, value in state.items()}


def apply_curriculum(
    groups: Sequence[GroupFigures], state: State, config: CurriculumLearningConfig, seed: int, epoch: int
) -> tuple[Selection, State, dict[str, Any]]:
    """Return the groups to train on in `epoch`, the state after it, and facts to show.

    A disabled curriculum selects everything. A single group is not filtered; `random_subsample` then draws
    from its trajectories. If no group has rewards that differ enough, nothing is selected. Then the epoch
    does not count as trained at its percentile.
    """
    present = {index: range(group.size) for index, group in enumerate(groups) if group.size}
    if not config.enabled:
        return {**present}, dict(state), {"curriculum_percentile": 1.0}
    if len(present) == 1:
        kept = {index: _subsample(units, len(units), config, seed, epoch) for index, units in present.items()}
        share = state["current_percentile"]
        return kept, dict(state), {"curriculum_percentile": share, "curriculum_groups": 1}
    least = config.min_reward_diff - _ROUNDING
    rewards = {index: groups[index].rewards for index in present}
    averages = {index: math.fsum(own) / len(own) for index, own in rewards.items()}
    valid = [index for index, own in rewards.items() if max(own) - min(own) >= least]
    facts: dict[str, Any] = {
        "curriculum_groups": len(valid),
        "curriculum_flat_groups": len(present) - len(valid),
    }
    if not valid:
        return {}, dict(state), facts | {"curriculum_percentile": state["current_percentile"]}
    valid.sort(key=lambda index: averages[index], reverse=not config.sort_ascending)
    expanded, share = dict(state), state["current_percentile"]
    if share < 1 and state["epochs_at_percentile"] >= config.expansion_interval:
        share = min(1.0, round(share + config.increment_percentile, 9))
        expanded |= {"current_percentile": share, "epochs_at_percentile": 0, "last_expansion_epoch": epoch}
    selected: Sequence[int] = valid[: max(1, math.ceil(len(valid) * share - _ROUNDING))]
    selected = _subsample(selected, len(valid), config, seed, epoch)
    names = (groups[index].example or str(index) for index in selected)
    after = expanded | {
        "epochs_at_percentile": expanded["epochs_at_percentile"] + 1,
        "total_groups": len(valid),
        "included_groups": sorted(names),
    }
    easiest_first = sorted((averages[index] for index in valid), reverse=True)
    facts |= {
        "curriculum_percentile": share,
        "curriculum_easiest": easiest_first[0],
        "curriculum_median": easiest_first[len(valid) // 2],
        "curriculum_hardest": easiest_first[-1],
    }
    return {index: present[index] for index in selected}, after, facts


def _subsample(
    items: Sequence[int], of: int, config: CurriculumLearningConfig, seed: int, epoch: int
) -> Sequence[int]:
    """Return at most the share `random_subsample` of `of` items, in their order."""
    if config.random_subsample is None:
        return items
    size = math.ceil(of * config.random_subsample - _ROUNDING)
    if len(items) <= size:
        return items
    chosen = generator(seed, "curriculum", epoch).sample(range(len(items)), size)
    return [items[index] for index in sorted(chosen)]
