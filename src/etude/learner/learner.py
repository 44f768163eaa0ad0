"""The learner: batches in, better weights out. It does not know which algorithm it serves."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from etude.core.errors import StoreError, TrainingError
from etude.core.keys import generator
from etude.learner.batch import TokenSequence, TrainingBatch
from etude.learner.checkpointing import checkpointed, layers_of
from etude.learner.objective import Objective, Pass
from etude.learner.packed import PackedStep
from etude.learner.padding import Unit, padded_passes
from etude.learner.schedule import Schedule
from etude.learner.tree_model import why_not_trees
from etude.models.policy import Policy
from etude.models.weights import load_tensors, save_tensors

Packing = Literal["tree", "padded"]
"""`tree` computes tokens that sequences share once, where there are any and the model takes token trees;
`padded` never does. The gradients are the same."""

OPTIMISER_FILE = "optimiser.safetensors"
STATE_FILE = "learner.json"


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """How to take optimiser steps."""

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    """How the learning rate rises and falls; a training is one call of `Learner.train`."""
    passes: int = 1
    """Times that a job goes over its data."""
    batch_size: int | None = None
    """Units per optimiser step; None takes all of a job at once."""
    token_budget: int = 16384
    """Tokens that go through the model at a time."""
    packing: Packing = "tree"
    gradient_checkpointing: bool = False
    """Compute what happens inside of the model's layers twice, and keep it never."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did."""

    step: int
    """Steps taken since the base model."""
    of: int
    """Steps that this job takes in all."""
    metrics: dict[str, float]


class TrainingCanceled(TrainingError):
    """The job was asked to stop before it was done."""


class Learner:
    """Trains a policy in place, and saves and restores all that the next step depends on."""

    def __init__(self, policy: Policy, options: LearnerOptions, seed: int) -> None:
        """Raises RequestError for options that do not go with the policy's model."""
        self.policy = policy
        self.options = options
        self.step = 0
        self.trained = 0
        """Trainings that are over, since the base model."""
        self.note: str | None = None
        """Why tokens that sequences share are computed for each of them, once it is known that they are."""
        self._takes_trees: bool | None = None
        if options.gradient_checkpointing:
            layers_of(policy.model)
        self._seed = seed
        self._part = 0.0
        self._optimiser = torch.optim.AdamW(
            list(policy.trainable().values()),
            lr=options.learning_rate,
            betas=options.betas,
            weight_decay=options.weight_decay,
        )

    def train(
        self,
        batch: TrainingBatch,
        objective: Objective,
        on_step: Callable[[StepReport], None] = lambda report: None,
        canceled: threading.Event | None = None,
    ) -> dict[str, float]:
        """Learn from a batch; returns the mean of the steps' metrics.

        The weights in memory change as it goes; after an error they are between two versions, and the
        caller restores one. Raises TrainingError when there is nothing to learn from or a step is not
        finite, TrainingCanceled when `canceled` is set.
        """
        units = [unit for unit in batch.units if any(any(sequence.weights) for sequence in unit)]
        if not any(_has_gradient(unit) for unit in units):
            raise TrainingError("there is nothing to learn from: no token has both a weight and an advantage")
        steps = self._plan(units, objective)
        reports: list[StepReport] = []
        with self.policy.lock:
            try:
                for number, step_units in enumerate(steps):
                    self._part = number / len(steps)
                    metrics = self._optimise(step_units, objective, canceled or threading.Event())
                    reports.append(StepReport(self.step, len(steps), metrics))
                    on_step(reports[-1])
            except TrainingCanceled as error:
                raise TrainingCanceled(f"canceled after {len(reports)} of {len(steps)} steps") from error
            finally:
                self._optimiser.zero_grad(set_to_none=True)
        self.trained += 1
        return _summary([report.metrics for report in reports])

    def evaluate(self, batch: TrainingBatch, objective: Objective) -> dict[str, float]:
        """The loss and metrics that a step on all of `batch` would have; nothing changes."""
        units: list[Unit] = [unit for unit in batch.units if any(any(sequence.weights) for sequence in unit)]
        totals: dict[str, float] = {"loss": 0.0}
        with self.policy.lock, torch.no_grad():
            for one in self._passes(units, objective):
                loss, metrics = self._loss(one, objective)
                for name, value in {"loss": float(loss), **metrics}.items():
                    totals[name] = totals.get(name, 0.0) + value
        return totals

    def divergences(self, sequences: Sequence[TokenSequence]) -> list[float]:
        """For each sequence the sum of log π_sampled - log π_ref over its trained tokens, in nats."""
        found = [0.0] * len(sequences)
        live = [number for number, sequence in enumerate(sequences) if any(sequence.weights)]
        units: list[Unit] = [(sequences[number],) for number in live]
        with self.policy.as_base(), torch.no_grad():
            for one in self._cut(units, [[1.0]] * len(units), 1.0):
                gap_BT = one.micro.sampled_BT - one.logprobs(self.policy.model)
                sums_B = torch.where(one.micro.weights_BT > 0, gap_BT, 0.0).sum(dim=1)
                for row, value in zip(one.rows, sums_B.tolist(), strict=True):
                    found[live[row]] = value
        return found

    def _plan(self, units: Sequence[Unit], objective: Objective) -> list[list[Unit]]:
        """The units of every optimiser step, shuffled anew for every pass."""
        size = self.options.batch_size or len(units)
        steps = []
        for number in range(self.options.passes):
            order = list(range(len(units)))
            if size < len(units):
                generator(self._seed, "pass", self.step, number).shuffle(order)
            steps += [[units[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
        # A step with nothing to learn from would still move weights by the optimiser's momentum.
        return [step for step in steps if not objective.skips_idle or any(map(_has_gradient, step))]

    def _optimise(
        self, units: list[Unit], objective: Objective, canceled: threading.Event
    ) -> dict[str, float]:
        start = time.perf_counter()
        self._optimiser.zero_grad(set_to_none=True)
        metrics, tokens = self.add_gradient(units, objective, canceled)
        norm = self._apply_gradient()
        seconds = max(time.perf_counter() - start, 1e-9)
        return {**metrics, "grad_norm": norm, "learning_rate": self._rate(), "tokens_per_s": tokens / seconds}

    def add_gradient(
        self, units: Sequence[Unit], objective: Objective, canceled: threading.Event | None = None
    ) -> tuple[dict[str, float], int]:
        """Add the gradient of an optimiser step to the parameters'; gives its metrics and trained tokens.

        A part of what `train` does, for callers that hold the policy's lock. Raises TrainingCanceled.
        """
        totals: dict[str, float] = {"loss": 0.0}
        tokens = 0
        for one in self._passes(units, objective):
            if canceled is not None and canceled.is_set():
                raise TrainingCanceled("canceled")
            loss, metrics = self._loss(one, objective)
            loss.backward()  # type: ignore[no-untyped-call]
            tokens += int((one.micro.weights_BT != 0).sum())
            for name, value in {"loss": float(loss.detach()), **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals, tokens

    def _passes(self, units: Sequence[Unit], objective: Objective) -> Iterable[Pass]:
        """The step's micro-batches, with the reference's logprobs where the objective wants them."""
        factors, share = objective.normalised(units), 1.0 / len(units)
        if objective.skips_idle:
            live = [index for index, unit in enumerate(units) if _has_gradient(unit)]
            units, factors = [units[i] for i in live], [factors[i] for i in live]
        passes = self._cut(units, factors, share)
        if not objective.needs_reference:
            return passes
        with self.policy.as_base(), torch.no_grad():
            return [self._with_reference(one) for one in passes]

    def _cut(self, units: Sequence[Unit], factors: Sequence[Sequence[float]], share: float) -> Iterator[Pass]:
        """As token trees where sequences begin alike and the model takes them, or else padded."""
        budget, device = self.options.token_budget, self.policy.device
        if self.options.packing == "tree":
            step = PackedStep(units)
            if step.pays and self._can_pack():
                return step.passes(factors, share, budget, device)
        return padded_passes(units, factors, share, budget, device)

    def _can_pack(self) -> bool:
        if self._takes_trees is None:
            reason = why_not_trees(self.policy.model)
            self._takes_trees = reason is None
            if reason is not None:
                self.note = f"tokens that sequences share are computed for each of them: {reason}"
        return self._takes_trees

    def _with_reference(self, one: Pass) -> Pass:
        return replace(one, micro=replace(one.micro, reference_BT=one.logprobs(self.policy.model)))

    def _loss(self, one: Pass, objective: Objective) -> tuple[torch.Tensor, dict[str, float]]:
        model = self.policy.model
        twice = self.options.gradient_checkpointing and torch.is_grad_enabled()
        with checkpointed(model) if twice else nullcontext():
            if not objective.needs_entropy:
                return objective.loss(one.logprobs(model), one.micro)
            logprobs_BT, entropy_BT = one.with_entropies(model)
            return objective.loss(logprobs_BT, replace(one.micro, entropy_BT=entropy_BT))

    def _apply_gradient(self) -> float:
        parameters = list(self.policy.trainable().values())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.options.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainingError(
                f"the gradient of step {self.step + 1} is not finite; lower learning_rate, or use float32"
            )
        self.step += 1
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate()
        self._optimiser.step()
        return norm

    def _rate(self) -> float:
        return self.options.learning_rate * self.options.schedule.share(self.step, self.trained, self._part)

    def save(self, folder: Path) -> None:
        """Write optimiser state and schedule position beside a version's weights. Raises StoreError."""
        save_tensors(self._optimiser_tensors(), folder / OPTIMISER_FILE)
        position = {"step": self.step, "trained": self.trained}
        try:
            (folder / STATE_FILE).write_text(json.dumps(position), encoding="utf-8")
        except OSError as error:
            raise StoreError(f"cannot write {folder / STATE_FILE}: {error}") from error

    def restore(self, folder: Path) -> None:
        """Go on from a saved state. Raises StoreError when it is missing or does not fit."""
        try:
            position = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            step, trained = int(position["step"]), int(position["trained"])
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"cannot read {folder / STATE_FILE}: {error}") from error
        state: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for key, value in load_tensors(folder / OPTIMISER_FILE).items():
            name, _, part = key.rpartition("/")
            state[name][part] = value
        parameters = self.policy.trainable()
        odd = sorted(state.keys() - parameters.keys())
        if odd:
            raise StoreError(
                f"the optimiser's state in {folder} belongs to other weights ({odd[0]}); was the model or "
                "the LoRA setting changed?"
            )
        self.step, self.trained = step, trained
        self._optimiser.state.clear()
        for name, parts in state.items():
            parameter = parameters[name]
            # AdamW counts steps on the CPU, wherever the weights are.
            self._optimiser.state[parameter] = {
                part: value if part == "step" else value.to(parameter.device) for part, value in parts.items()
            }

    def reset(self) -> None:
        """Forget all steps: the state that goes with the base model."""
        self.step = self.trained = 0
        self._optimiser.state.clear()

    def _optimiser_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{key}": value
            for name, parameter in self.policy.trainable().items()
            for key, value in self._optimiser.state.get(parameter, {}).items()
        }


def _summary(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of the steps' metrics.

    `mismatch_kl` is `sampled_kl` before anything was changed: of the learner from the engine, where that
    sampled from the same weights.
    """
    names = {name for metrics in steps for name in metrics}
    means = {name: sum(metrics.get(name, 0.0) for metrics in steps) / len(steps) for name in sorted(names)}
    first = steps[0].get("sampled_kl")
    return means if first is None else {**means, "mismatch_kl": first}


def _has_gradient(unit: Unit) -> bool:
    return any(sequence.has_gradient for sequence in unit)
