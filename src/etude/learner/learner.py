"""The learner: batches in, better weights out. It does not know which algorithm it serves."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from etude.core.errors import StoreError, TrainingError
from etude.core.keys import generator
from etude.learner.batch import TokenSequence, TrainingBatch
from etude.learner.objective import MicroBatch, Objective
from etude.learner.padding import micro_batches, token_logprobs
from etude.models.policy import Policy
from etude.models.weights import load_tensors, save_tensors

OPTIMISER_FILE = "optimiser.safetensors"
STATE_FILE = "learner.json"


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """How to take optimiser steps."""

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0, counted over the whole run."""
    passes: int = 1
    """Times that a job goes over its data."""
    batch_size: int | None = None
    """Units per optimiser step; None takes all of a job at once."""
    token_budget: int = 16384
    """Padded tokens that go through the model at a time."""


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
        self.policy = policy
        self.options = options
        self.step = 0
        self._seed = seed
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
        if not any(sequence.has_gradient for unit in units for sequence in unit):
            raise TrainingError("there is nothing to learn from: no token has both a weight and an advantage")
        steps = self._plan(units)
        reports: list[StepReport] = []
        with self.policy.lock:
            for index, step_units in enumerate(steps):
                if canceled is not None and canceled.is_set():
                    raise TrainingCanceled(f"canceled after {index} of {len(steps)} steps")
                metrics = self._optimise(step_units, objective)
                reports.append(StepReport(self.step, len(steps), metrics))
                on_step(reports[-1])
        names = {name for report in reports for name in report.metrics}
        return {
            name: sum(report.metrics.get(name, 0.0) for report in reports) / len(reports)
            for name in sorted(names)
        }

    def _plan(self, units: Sequence[Sequence[TokenSequence]]) -> list[list[Sequence[TokenSequence]]]:
        """The units of every optimiser step, shuffled anew for every pass."""
        size = self.options.batch_size or len(units)
        steps = []
        for number in range(self.options.passes):
            order = list(range(len(units)))
            if size < len(units):
                generator(self._seed, "pass", self.step, number).shuffle(order)
            steps += [[units[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
        return steps

    def _optimise(self, units: list[Sequence[TokenSequence]], objective: Objective) -> dict[str, float]:
        start = time.perf_counter()
        factors = objective.normalised(units)
        if objective.skips_idle:
            live = [index for index, unit in enumerate(units) if any(s.has_gradient for s in unit)]
            units, factors = [units[i] for i in live], [factors[i] for i in live]
        totals: dict[str, float] = {"loss": 0.0}
        tokens = 0
        self._optimiser.zero_grad(set_to_none=True)
        for micro in micro_batches(units, factors, self.options.token_budget, self.policy.device):
            micro = self._with_reference(micro, objective)
            loss, metrics = objective.loss(token_logprobs(self.policy.model, micro), micro)
            loss.backward()  # type: ignore[no-untyped-call]
            tokens += int((micro.weights_BT != 0).sum())
            for name, value in {"loss": float(loss.detach()), **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value
        norm = self._apply_gradient()
        seconds = max(time.perf_counter() - start, 1e-9)
        return {**totals, "grad_norm": norm, "learning_rate": self._rate(), "tokens_per_s": tokens / seconds}

    def _with_reference(self, micro: MicroBatch, objective: Objective) -> MicroBatch:
        if not objective.needs_reference:
            return micro
        with self.policy.as_base(), torch.no_grad():
            return replace(micro, reference_BT=token_logprobs(self.policy.model, micro))

    def _apply_gradient(self) -> float:
        parameters = list(self.policy.trainable().values())
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.options.max_grad_norm))
        if not torch.isfinite(torch.tensor(norm)):
            raise TrainingError(
                f"the gradient of step {self.step + 1} is not finite; lower learning_rate, or use float32"
            )
        self.step += 1
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate()
        self._optimiser.step()
        return norm

    def _rate(self) -> float:
        warmup = self.options.warmup_steps
        return self.options.learning_rate * (min(1.0, self.step / warmup) if warmup else 1.0)

    def save(self, folder: Path) -> None:
        """Write optimiser state and step count beside a version's weights."""
        save_tensors(self._optimiser_tensors(), folder / OPTIMISER_FILE)
        (folder / STATE_FILE).write_text(json.dumps({"step": self.step}))

    def restore(self, folder: Path) -> None:
        """Go on from a saved state. Raises StoreError when it is missing or does not fit."""
        try:
            self.step = int(json.loads((folder / STATE_FILE).read_text())["step"])
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"cannot read {folder / STATE_FILE}: {error}") from error
        saved = load_tensors(folder / OPTIMISER_FILE)
        for name, parameter in self.policy.trainable().items():
            mine = {
                key.rpartition("/")[2]: value
                for key, value in saved.items()
                if key.rpartition("/")[0] == name
            }
            self._optimiser.state[parameter] = {
                key: value.clone() if key == "step" else value.to(parameter.device)
                for key, value in mine.items()
            }

    def reset(self) -> None:
        """Forget all steps: the state that goes with the base model."""
        self.step = 0
        self._optimiser.state.clear()

    def _optimiser_tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{key}": value
            for name, parameter in self.policy.trainable().items()
            for key, value in self._optimiser.state.get(parameter, {}).items()
        }
