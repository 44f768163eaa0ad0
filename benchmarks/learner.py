"""The cost of a learner's step: tokens that sequences share once, against padding and against TRL.

Loss and gradient only, from the same sequences on the same model in float32 with one thread. The padded
loop is Etude's own with `packing: padded`. Each peer has several settings, of which its fastest counts. CPU
time is that of this process, and the ways take turns. `--long` measures conversations of 2k to 8k tokens, and
nothing else.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from common import parse_arguments, print_json, print_table, progress, silent
from learner_data import LONG, MODELS, SHAPES, model
from learner_trl import Step, steps
from torch.profiler import ProfilerActivity, profile

from etude.algorithms.dpo import Dpo
from etude.algorithms.grpo import Grpo
from etude.algorithms.supervised import Supervised
from etude.core.sample import Sample
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.objective import Objective
from etude.learner.packed import PackedStep
from etude.models.policy import Policy

METHODS: dict[str, Objective] = {"grpo": Grpo(), "dpo": Dpo(), "sft": Supervised()}
GOALS = {
    "trl": {"short": 3.0, "long": 8.0, "turns": 10.0},
    "padded": {"short": 1.8, "long": 4.5, "turns": 5.0},
}
"""None are set for what `--long` measures."""
HEADLINE = next(iter(MODELS))
"""The model and the method of the JSON's ratios; `settings` has the others."""
PADDED_BUDGETS = (512, 2048, 16384)
LONG_MODEL = "0.9M"
LONG_BUDGETS = (8192,)
LONG_ROWS = (1, 2)
"""Rows at a time, for TRL: more take more than 4 GB."""


@dataclass(frozen=True)
class Setting:
    """One thing to train, and how."""

    model: str
    method: str
    shape: str

    @property
    def name(self) -> str:
        """For messages and the table."""
        return f"{self.model}, {self.method}, {self.shape}"


@dataclass(frozen=True)
class Cost:
    """The cost of a step by each way: CPU milliseconds, and megabytes at the most."""

    ms: dict[str, float]
    mb: dict[str, float]
    gradient_error: float
    """Largest difference between the gradients of tree and padding, relative to the largest number."""
    tokens: int
    """Tokens of all sequences."""
    distinct: int
    """Tokens of the tree."""

    def ratio(self, peer: str) -> float:
        """How many times as long a peer takes."""
        return self.ms[peer] / self.ms["tree"]


def settings(quick: bool) -> list[Setting]:
    """GRPO on both models, and the other methods on the first; quick: GRPO on the first."""
    pairs = [(HEADLINE, "grpo")]
    if not quick:
        pairs += [(HEADLINE, method) for method in METHODS if method != "grpo"]
        pairs += [(name, "grpo") for name in MODELS if name != HEADLINE]
    return [Setting(name, method, shape) for name, method in pairs for shape in SHAPES]


def long_settings() -> list[Setting]:
    """GRPO on long conversations."""
    return [Setting(LONG_MODEL, "grpo", shape) for shape in LONG]


def units_of(method: str, sequences: Sequence[Sample]) -> list[tuple[Sample, ...]]:
    """Pairs for DPO, of neighbours."""
    if method == "dpo":
        return list(zip(sequences[0::2], sequences[1::2], strict=True))
    return [(one,) for one in sequences]


def own_step(policy: Policy, setting: Setting, units: Sequence[Any], **options: Any) -> Step:
    """Loss and gradient by Etude's learner, from the sequences on."""
    learner = Learner(policy, LearnerOptions(**options))

    def step() -> None:
        policy.model.zero_grad(set_to_none=True)
        learner.add_gradient(units, METHODS[setting.method])

    return step


def measure(setting: Setting, repeats: int) -> Cost:
    """Medians of all ways on one setting, each at its fastest."""
    policy, sequences = model(setting.model), (SHAPES | LONG)[setting.shape](random.Random(0))
    units = units_of(setting.method, sequences)
    budgets = PADDED_BUDGETS if setting.shape in SHAPES else LONG_BUDGETS
    padded = [own_step(policy, setting, units, packing="padded", token_budget=one) for one in budgets]
    ways = {
        "tree": own_step(policy, setting, units),
        "padded": fastest(padded),
        "trl": fastest(_of_trl(policy, setting, sequences)),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, step in ways.items():
            found[name].append(cpu_ms(step))
    packed = PackedStep(units)
    return Cost(
        ms={name: statistics.median(values) for name, values in found.items()},
        mb={name: peak_mb(step) for name, step in ways.items()},
        gradient_error=difference(gradient(policy, ways["tree"]), gradient(policy, ways["padded"])),
        tokens=sum(len(one.ids) for one in sequences),
        distinct=packed.size,
    )


def _of_trl(policy: Policy, setting: Setting, sequences: Sequence[Sample]) -> list[Step]:
    if setting.shape in SHAPES:
        return [*steps(setting.method, policy, sequences).values()]
    candidates = steps(setting.method, policy, sequences, LONG_ROWS)
    return [candidates[str(rows)] for rows in LONG_ROWS]


def cpu_ms(step: Step) -> float:
    """CPU time of one step."""
    start = time.process_time()
    step()
    return (time.process_time() - start) * 1000


def fastest(candidates: Any) -> Step:
    """The step that takes the least, by the better of two tries after a first."""
    found: list[tuple[float, Step]] = []
    for step in candidates:
        step()
        found.append((min(cpu_ms(step), cpu_ms(step)), step))
    return min(found, key=lambda one: one[0])[1]


def peak_mb(step: Step) -> float:
    """The most memory that torch held during a step, beyond what it held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    held, most = 0, 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most / 1e6


def gradient(policy: Policy, step: Step) -> torch.Tensor:
    """All gradients of a step of Etude's, as one vector."""
    step()
    grads = [value.grad for value in policy.trainable().values()]
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest number."""
    return float((one - other).abs().max() / other.abs().max())


def measure_all(quick: bool, long: bool, note: Callable[[str], None]) -> dict[Setting, Cost]:
    """All settings; `note` is told what is measured next."""
    torch.set_num_threads(1)
    costs = {}
    repeats = (3, 5)[not quick] if long else (5, 7)[not quick]
    for setting in long_settings() if long else settings(quick):
        note(setting.name)
        costs[setting] = measure(setting, repeats)
    return costs


def as_json(costs: dict[Setting, Cost]) -> dict[str, Any]:
    """The object that `--json` prints; the ratios are those of GRPO on the first model."""
    name = next(iter(costs)).model
    first = {one.shape: cost for one, cost in costs.items() if (one.model, one.method) == (name, "grpo")}
    return {
        "ratio_vs_trl": {shape: round(cost.ratio("trl"), 2) for shape, cost in first.items()},
        "ratio_vs_padded": {shape: round(cost.ratio("padded"), 2) for shape, cost in first.items()},
        "peak_memory_ratio": {
            shape: round(cost.mb["tree"] / cost.mb["trl"], 3) for shape, cost in first.items()
        },
        "max_relative_gradient_error": max(cost.gradient_error for cost in costs.values()),
        "versions": versions(),
        "settings": [
            {
                "model": one.model,
                "method": one.method,
                "shape": one.shape,
                "tokens": cost.tokens,
                "distinct_tokens": cost.distinct,
                "cpu_ms": {name: round(value, 1) for name, value in cost.ms.items()},
                "peak_mb": {name: round(value, 1) for name, value in cost.mb.items()},
                "ratio_vs_trl": round(cost.ratio("trl"), 2),
                "ratio_vs_padded": round(cost.ratio("padded"), 2),
                "gradient_error": cost.gradient_error,
            }
            for one, cost in costs.items()
        ],
    }


def versions() -> dict[str, str]:
    """Of what was measured."""
    return {name: version(name) for name in ("torch", "transformers", "trl")}


def print_results(costs: dict[Setting, Cost]) -> None:
    """The table, with the goals of GRPO."""
    rows = []
    for one, cost in costs.items():
        ms, mb = cost.ms, cost.mb
        rows.append(
            [
                one.name,
                f"{cost.distinct} of {cost.tokens}",
                *(f"{ms[name]:.0f}" for name in ("tree", "padded", "trl")),
                *(_ratio(cost.ratio(peer), GOALS[peer].get(one.shape)) for peer in ("padded", "trl")),
                *(f"{mb[name]:.0f}" for name in ("tree", "padded", "trl")),
            ]
        )
    columns = ["", "tokens", "tree ms", "padded", "TRL", "x padded", "x TRL", "tree MB", "padded", "TRL"]
    error = max(cost.gradient_error for cost in costs.values())
    print_table(
        "Loss and gradient of one optimiser step",
        columns,
        rows,
        [
            "ms: CPU time; x: how many times as long a peer takes (the goal); MB: torch's peak memory",
            f"gradients of tree and padding differ by {error:.1g} of the largest number at most",
            ", ".join(f"{name} {number}" for name, number in versions().items()),
        ],
    )


def _ratio(ratio: float, goal: float | None) -> str:
    return f"{ratio:.1f}" if goal is None else f"{ratio:.1f} ({goal:g})"


def main() -> None:
    """Measure, and print a table or JSON."""
    arguments = parse_arguments(__doc__ or "", long="conversations of 2k to 8k tokens alone")
    costs = measure_all(arguments.quick, arguments.long, silent if arguments.json else progress)
    if arguments.json:
        print_json(as_json(costs))
    else:
        print_results(costs)


if __name__ == "__main__":
    main()
