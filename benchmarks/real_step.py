"""Steps of GRPO at real size: token trees and TRL, each in the best precision that this CPU multiplies."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpu_learner import Way
from gpu_model import work_of
from learner_trl import Step, steps
from real_model import DTYPES, PRECISIONS, Note, Ratio, Size, matrix_rate, median, policy_of, rounds, timed

from etude.core.sample import Sample
from etude.models.policy import Policy

TRIED = 4
"""Sequences that TRL's settings are tried with, before the fastest takes a whole step."""
HELD = 4096
"""Tokens that TRL has at a time at most, where a row is not longer: twice as many took 13 GB."""


def measure(size: Size, quick: bool, note: Note) -> dict[str, Any]:
    """For each shape the cost of a gradient, of the whole step, and of TRL's gradient."""
    policies = {name: policy_of(size, DTYPES[name]) for name in PRECISIONS}
    shapes = ["turns"] if quick else size.shapes
    return {shape: _measured(size, shape, policies, size.rounds[quick], note) for shape in shapes}


def _measured(size: Size, shape: str, policies: dict[str, Policy], count: int, note: Note) -> dict[str, Any]:
    sequences = size.shapes[shape](random.Random(0))
    units = [(one,) for one in sequences]
    note(f"{size.name}, {shape}: TRL's settings")
    chosen, trl = _fastest_trl(size, policies, sequences)
    note(f"{size.name}, {shape}: {count} rounds, TRL with {chosen}")
    own = {name: Way(policy, units, "tree", 16384) for name, policy in policies.items()}
    ways: dict[str, Step] = {**own, **{f"{name} step": way.whole for name, way in own.items()}, "trl": trl}
    costs = rounds({name: partial(timed, step) for name, step in ways.items()}, count)
    best = min(PRECISIONS, key=lambda name: median(costs[name]))
    work = work_of(sequences, tree=True)
    rate, flops = matrix_rate(policies[best], work.tokens), work.flops(policies[best])
    whole = {name: costs[f"{name} step"] for name in PRECISIONS}
    return {
        "tokens": sum(len(one.ids) for one in sequences),
        "distinct_tokens": work.tokens,
        "trained_tokens": work.choices,
        "cpu_s": {name: round(median(found)[0], 3) for name, found in costs.items()},
        "wall_s": {name: round(median(found)[1], 3) for name, found in costs.items()},
        "trl": chosen,
        "own": best,
        "speedup_bf16": Ratio.of(whole["bfloat16"], whole["float32"]).as_json() if len(whole) > 1 else None,
        "vs_trl": Ratio.of(costs[best], costs["trl"]).as_json(),
        "tflop": round(flops / 1e12, 3),
        "matrix_gflops_per_cpu_s": round(rate / 1e9, 1),
        "share_of_limit": round(flops / rate / median(whole[best])[0], 3),
        "notes": [way.learner.note for way in own.values() if way.learner.note],
    }


def _fastest_trl(size: Size, policies: dict[str, Policy], sequences: Sequence[Sample]) -> tuple[str, Step]:
    """The precision, and how many rows at a time, that take the least for a few sequences in all places."""
    few = sequences[:: max(1, len(sequences) // TRIED)][:TRIED]
    longest = max(len(one.ids) for one in sequences)
    counts = [count for count in size.rows if count * longest <= HELD] or [1]
    found = []
    for dtype, policy in policies.items():
        candidates = steps("grpo", policy, few, counts)
        # All rows of a step at once would not fit into memory.
        for rows in map(str, counts):
            candidates[rows]()
            found.append((timed(candidates[rows])[0], dtype, rows))
            _drop_gradient(candidates[rows])
    _, dtype, rows = min(found)
    step = steps("grpo", policies[dtype], sequences, [int(rows)])[rows]

    def fresh() -> None:
        step()
        _drop_gradient(step)

    return f"{dtype}, {rows} rows at a time", fresh


def _drop_gradient(step: Step) -> None:
    """A peer's gradient is not to be in memory while others are measured."""
    step.model.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
