"""Steps of GRPO at real sizes: by token trees, padded, and by TRL where it is installed."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gpu_measuring import Step, fastest, median_seconds, peak_megabytes
from gpu_model import FULL, Scale, Work, policy_of, work_of
from learner_trl import steps

from etude.algorithms.grpo import Grpo
from etude.core.sample import Sample
from etude.learner.learner import Learner, LearnerOptions
from etude.models.policy import Policy

Note = Callable[[str], None]


@dataclass
class Cost:
    """The cost of a step by each way."""

    shape: str
    work: dict[str, Work]
    """Of a tree, and of sequences by themselves."""
    seconds: dict[str, float] = field(default_factory=dict)
    mb: dict[str, float] = field(default_factory=dict)
    chosen: dict[str, str] = field(default_factory=dict)
    """The fastest setting of each way."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Ways that were not measured, and why."""
    gradient_difference: float | None = None
    """Between tree and padding in bfloat16: the norm of the difference, relative to that of padding."""

    def as_json(self, policy: Policy, rate: float) -> dict[str, Any]:
        """Its part of the JSON; `rate` is that of the matrix product."""
        own = {way: "tree" if way in ("tree", "step") else "padded" for way in self.seconds}
        tokens = self.work["padded"].tokens
        flops = {kind: work.flops(policy) for kind, work in self.work.items()}
        return {
            "shape": self.shape,
            "tokens": tokens,
            "distinct_tokens": self.work["tree"].tokens,
            "ms": {way: round(time * 1000, 2) for way, time in self.seconds.items()},
            "tokens_per_s": {way: round(tokens / time) for way, time in self.seconds.items()},
            "matrix_share": {
                way: round(flops[own[way]] / time / rate, 4) for way, time in self.seconds.items()
            },
            "peak_mb": {way: round(value, 1) for way, value in self.mb.items()},
            "chosen": self.chosen,
            "left_out": self.left_out,
            "ratio_vs_padded": self._ratio("padded"),
            "ratio_vs_trl": self._ratio("trl"),
            "gradient_difference": self.gradient_difference,
        }

    def _ratio(self, peer: str) -> float | None:
        there = peer in self.seconds and "tree" in self.seconds
        return round(self.seconds[peer] / self.seconds["tree"], 2) if there else None


class Way:
    """Loss and gradient by Etude's learner, with one packing and token budget."""

    def __init__(self, policy: Policy, units: Sequence[Any], packing: str, budget: int) -> None:
        options = LearnerOptions(packing=packing, token_budget=budget, learning_rate=1e-6)  # type: ignore[arg-type]
        self.learner = Learner(policy, options)
        self._units = units

    def __call__(self) -> None:
        try:
            self._add()
        finally:  # Where memory was too little, the next one is to have all of it.
            self.learner.optimiser.drop_gradient()

    def whole(self) -> None:
        """The same, and what an optimiser step has beside it."""
        self.learner.take_step(self._units, Grpo())

    def gradient(self) -> torch.Tensor:
        """All of it, as one vector in float32."""
        self._add()
        masters = self.learner.optimiser.masters.values()
        found = [one.grad.flatten().float() for one in masters if one.grad is not None]
        self.learner.optimiser.drop_gradient()
        return torch.cat(found)

    def _add(self) -> None:
        self.learner.optimiser.drop_gradient()
        self.learner.add_gradient(self._units, Grpo())


def measure(policy: Policy, scale: Scale, repeats: int, note: Note) -> list[Cost]:
    """All shapes; `note` is told what is measured next."""
    return [_measured(policy, scale, shape, repeats, note) for shape in scale.shapes]


def _measured(policy: Policy, scale: Scale, shape: str, repeats: int, note: Note) -> Cost:
    sequences = scale.shapes[shape](random.Random(0))
    units = [(one,) for one in sequences]
    cost = Cost(shape, {"tree": work_of(sequences, tree=True), "padded": work_of(sequences, tree=False)})
    chosen: dict[str, Step] = {}
    for way, packing in (("tree", "tree"), ("padded", "padded")):
        note(f"{scale.name}, {shape}, {way}")
        ways = {str(budget): Way(policy, units, packing, budget) for budget in scale.budgets}
        _choose(cost, chosen, way, ways, policy.device)
        notes = [one.learner.note for one in ways.values() if one.learner.note]
        if notes:
            cost.left_out[way] = notes[0]
    note(f"{scale.name}, {shape}, TRL")
    _choose_trl(cost, chosen, policy, sequences, scale)
    note(f"{scale.name}, {shape}, all")
    tree, padded = chosen.get("tree"), chosen.get("padded")
    if isinstance(tree, Way) and isinstance(padded, Way):
        cost.gradient_difference = _difference(tree, padded)
    if isinstance(tree, Way):
        _choose(cost, chosen, "step", {cost.chosen["tree"]: tree.whole}, policy.device)
    cost.seconds = median_seconds(chosen, repeats, policy.device)
    for name, step in chosen.items():
        if name == "trl":
            # What the last step left is not to be of use to the next.
            step.model.zero_grad(set_to_none=True)  # type: ignore[attr-defined]
        cost.mb[name] = peak_megabytes(step, policy.device)
        note(f"… {name}: {cost.seconds[name] * 1000:.1f} ms, {cost.mb[name]:.0f} MB")
    return cost


def _choose(
    cost: Cost, chosen: dict[str, Step], way: str, candidates: dict[str, Any], device: torch.device
) -> None:
    found = fastest(candidates, device)
    if found is None:
        cost.left_out[way] = "the device's memory does not hold it"
        return
    cost.chosen[way], chosen[way] = found


def _choose_trl(
    cost: Cost, chosen: dict[str, Step], policy: Policy, sequences: Sequence[Sample], scale: Scale
) -> None:
    if importlib.util.find_spec("trl") is None:
        cost.left_out["trl"] = "trl is not installed"
        return
    try:
        candidates = steps("grpo", policy, sequences, scale.rows)
        _choose(cost, chosen, "trl", candidates, policy.device)
    except Exception as error:  # noqa: BLE001  whatever it breaks by, the rest is to be measured
        cost.left_out["trl"] = f"{type(error).__name__}: {error}"


def _difference(tree: Way, padded: Way) -> float:
    one, other = tree.gradient(), padded.gradient()
    return float(f"{float((one - other).norm() / other.norm()):.3g}")


def exactness(scale: Scale, device: torch.device) -> dict[str, Any]:
    """The gradient of trees against padding in float32, on a model of two layers of the same width.

    The largest difference, relative to the largest number; and why trees were padded, if they were.
    """
    policy = policy_of(scale, device, torch.float32, num_hidden_layers=2, vocab_size=512)
    sequences = scale.shapes["turns"](random.Random(0))[: 12 if scale is FULL else None]
    units = [(one,) for one in sequences]
    tree, padded = (Way(policy, units, packing, 16384) for packing in ("tree", "padded"))
    one, other = tree.gradient(), padded.gradient()
    found = float((one - other).abs().max() / other.abs().max())
    return {"max_relative_gradient_error_float32": found, "note": tree.learner.note}
