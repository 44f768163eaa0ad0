"""The learner, which trains a policy on samples. It does not know which algorithm they come from."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Literal, TypeAlias

import torch

from etude.core.errors import StoreError, TrainingError
from etude.core.sample import Sample, Unit, has_gradient, is_trained, trained_tokens
from etude.learner.head import has_plain_head
from etude.learner.objective import Objective, Pass, with_start_logprobs
from etude.learner.optimiser import OPTIMISER_FILE, STATE_FILE, Optimiser, Schedule, Snapshot
from etude.learner.passes import PackedStep, Shares, padded_passes, padded_row, trained_units, tree_refusal
from etude.learner.team import Team, idle
from etude.learner.tree_llama import checkpointable_layers, checkpointing_layers
from etude.models.architecture import text_config
from etude.models.policy import Policy
from etude.models.weights import load_tensors
from etude.store.files import require_as_written

_BUDGET_ON_GPU, _LEAST_BUDGET = 16384, 1024
"""Default tokens in a pass through the model on a GPU, and the least on a CPU."""
_KEPT = 1_200_000_000
"""Bytes that a pass on a CPU keeps for the gradient by default: more saved no time."""
_KEPT_PER_NUMBER = 18
"""Numbers that a layer keeps for the gradient of each token, as a multiple of its width."""

Packing: TypeAlias = Literal["tree", "padded"]
"""`tree` computes shared tokens only once, if sequences share enough and the model supports token trees;
`padded` never does. The gradients are the same."""


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """Options of optimiser steps."""

    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float = 1.0
    schedule: Schedule = field(default_factory=Schedule)
    token_budget: int | None = None
    """Maximum number of tokens in a pass through the model; None chooses it by device and model."""
    packing: Packing = "tree"
    gradient_checkpointing: bool | None = None
    """Recompute activations inside the model's layers for the gradient, instead of keeping them. With None,
    this starts when a GPU's memory has run out."""


class TrainingCanceled(TrainingError):
    """The job was asked to stop before it was done."""


class Learner:
    """Trains a policy in place, and saves and restores all state that the next step depends on.

    In a team of several processes, each has a learner, and all call the same methods together.
    """

    def __init__(self, policy: Policy, options: LearnerOptions, team: Team | None = None) -> None:
        """Raises RequestError for options that do not fit the policy's model."""
        self.policy = policy
        self.team = team or Team()
        self.options = options
        self.note: str | None = None
        """Why more is computed than necessary, once that is known."""
        self.step = 0
        self.trained = 0
        """Number of trainings completed since the base model."""
        self._spares_memory = False
        self._start: dict[int, tuple[Sample, list[float]]] | None = None
        """Logprobs at the start of a job of several steps, for clipped ratios. They belong to each sample's
        trained tokens, in order, by `id` of the sample. The entry keeps the sample alive."""
        if options.gradient_checkpointing:
            checkpointable_layers(policy.model)
        self._run = self.team.hold(policy)

    @cached_property
    def optimiser(self) -> Optimiser:
        """AdamW, made before the first step: copying the weights takes as long as sampling a few tokens."""
        options = self.options
        return Optimiser(self.policy.trainable(), betas=options.betas, weight_decay=options.weight_decay)

    @cached_property
    def _takes_trees(self) -> bool:
        """Whether the model supports token trees. All processes must ask together."""
        with torch.no_grad():
            reason = self._run(tree_refusal)
        # It decides how a step is dealt, so all processes must agree.
        if not self.team.any(reason is not None):
            return True
        why = reason or "another process cannot run this model on token trees"
        self._add_note(f"tokens that sequences share are computed for each of them: {why}")
        return False

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens in a pass through the model."""
        if self.options.token_budget is not None:
            return self.options.token_budget
        if self.policy.device.type == "cuda":
            return _BUDGET_ON_GPU
        model = self.policy.model
        config, size = text_config(model), model.get_input_embeddings().weight.itemsize
        kept = _KEPT_PER_NUMBER * int(config.num_hidden_layers * config.hidden_size * size)
        return min(max(_KEPT // kept, _LEAST_BUDGET), _BUDGET_ON_GPU)

    def _add_note(self, note: str) -> None:
        self.note = note if self.note is None else f"{self.note}; {note}"

    @cached_property
    def _has_plain_head(self) -> bool:
        """Whether the model has a plain head, which padded passes depend on. All must ask together."""
        with torch.no_grad():
            return not self.team.any(not self._run(has_plain_head))

    def take_step(
        self,
        units: Sequence[Unit],
        objective: Objective,
        part: float = 0.0,
        canceled: threading.Event | None = None,
    ) -> dict[str, float]:
        """Take one optimiser step on all of `units`; return its metrics.

        `part` is the share of the training before this step, in [0, 1), for the learning rate. Raises
        TrainingError if the gradient is not finite, TrainingCanceled if `canceled` is set.
        """
        with self.policy.lock:
            self.optimiser.sync_masters()
            self.optimiser.drop_gradient()
            start = time.perf_counter()
            try:
                canceled = canceled or threading.Event()
                try:
                    metrics, tokens = self._add_gradient_sparingly(units, objective, canceled)
                except TrainingCanceled:
                    metrics, tokens = {}, 0
                counts = {"tokens": float(tokens), "canceled": float(canceled.is_set())}
                totals = self.team.sum(metrics | counts)
                if totals.pop("canceled"):
                    raise TrainingCanceled("canceled")
                self.team.sum_gradients(self.optimiser.gradients)
                norm = self.optimiser.clip(self.options.max_grad_norm)
                if not math.isfinite(norm):
                    failed = f"the gradient of step {self.step + 1} is not finite"
                    raise TrainingError(f"{failed}; lower learning_rate, or use float32")
                self.step += 1
                rate = self.options.schedule.share(self.step, self.trained, part) * self.options.learning_rate
                self.optimiser.step(rate)
            finally:
                self.optimiser.drop_gradient()
            speed = totals.pop("tokens") / max(time.perf_counter() - start, 1e-9)
        return totals | {"grad_norm": norm, "learning_rate": rate, "tokens_per_s": speed}

    def _add_gradient_sparingly(
        self, units: Sequence[Unit], objective: Objective, canceled: threading.Event
    ) -> tuple[dict[str, float], int]:
        """Add the gradient, and add it again with gradient checkpointing if a GPU's memory runs out."""
        try:
            return self.add_gradient(units, objective, canceled)
        except torch.OutOfMemoryError:
            self.optimiser.drop_gradient()
            wish = self.options.gradient_checkpointing
            if wish is not None or self._spares_memory or self.team.shards:
                raise
        checkpointable_layers(self.policy.model)
        self._spares_memory = True
        self._add_note("layers are computed twice, because the GPU's memory had run out")
        torch.cuda.empty_cache()
        return self.add_gradient(units, objective, canceled)

    def end_training(self) -> None:
        """Record that all steps of a training have been taken; the next training begins at its start."""
        self.trained += 1
        self._start = None

    def evaluate(self, units: Sequence[Unit], objective: Objective) -> dict[str, float]:
        """Return the loss and metrics that a step on all of `units` would have; change nothing."""
        units = [unit for unit in units if is_trained(unit)]
        totals: dict[str, float] = {"loss": 0.0}
        with self.policy.lock, torch.no_grad():
            for chunk in self._passes(units, objective):
                loss, metrics = self._loss(chunk, objective)
                for name, value in {"loss": float(loss), **metrics}.items():
                    totals[name] = totals.get(name, 0.0) + value
        return self.team.sum(totals)

    def begin_training(self, units: Sequence[Unit], objective: Objective) -> None:
        """Record the tokens' logprobs before the first step of a job of several steps, if the loss needs
        them. All processes must call it together."""
        self._start = None
        if "start" in objective.needs() and units:
            computed = filter(has_gradient, units) if objective.skips_idle else units
            samples = [*chain.from_iterable(computed)]
            own = zip(samples, self.logprobs(samples), strict=True)
            self._start = {id(each): (each, logprobs) for each, logprobs in own}

    def logprobs(self, samples: Sequence[Sample]) -> list[list[float]]:
        """Return the logprobs of each sample's trained tokens, in order, under the weights in memory."""
        live = [index for index, sample in enumerate(samples) if any(sample.loss_weights)]
        units: list[Unit] = [(samples[index],) for index in live]
        found: dict[str, float] = {}
        with self.policy.lock, torch.no_grad():
            for chunk in self._cut(units, None, (1.0, 1.0)):
                if chunk is None:
                    self._run(idle)
                    continue
                for row, values in zip(chunk.rows, chunk.select(self._run(chunk.logprobs)), strict=True):
                    found |= {f"{live[row]}/{place}": value for place, value in enumerate(values)}
        logprobs: list[list[float]] = [[] for _ in samples]
        for name, value in self.team.sum(found).items():
            logprobs[int(name.partition("/")[0])].append(value)
        return logprobs

    def add_gradient(
        self, units: Sequence[Unit], objective: Objective, canceled: threading.Event | None = None
    ) -> tuple[dict[str, float], int]:
        """Add this process's part of a step's gradient; return metrics and the number of trained tokens.

        This is a part of `take_step`, for callers that hold the policy's lock. Raises TrainingCanceled.
        """
        totals: dict[str, float] = {"loss": 0.0}
        tokens = 0
        for chunk in self._passes(units, objective):
            if self.team.halts(canceled is not None and canceled.is_set()):
                raise TrainingCanceled("canceled")
            loss, metrics = self._loss(chunk, objective)
            with self.optimiser.gathering():
                self.team.backward(loss)
            tokens += 0 if chunk is None else int((chunk.micro.weights_BT != 0).sum())
            for name, value in {"loss": float(loss.detach()), **metrics}.items():
                totals[name] = totals.get(name, 0.0) + value
        return totals, tokens

    def _loss(self, chunk: Pass | None, objective: Objective) -> tuple[torch.Tensor, dict[str, float]]:
        wish = self.options.gradient_checkpointing
        twice = (self._spares_memory if wish is None else wish) and torch.is_grad_enabled()
        with checkpointing_layers(self.policy.model) if twice else nullcontext():
            if chunk is None:
                return self._run(idle), {}
            loss, metrics = objective.loss(self._run(chunk.logprobs), chunk.micro)
        if loss.ndim or (torch.is_grad_enabled() and not loss.requires_grad):
            what = f"a tensor of shape {[*loss.shape]}" if loss.ndim else "a number without a gradient"
            name = f"{type(objective).__qualname__}.loss"
            raise TrainingError(f"{name} returned {what}; return one number made of `logprobs_BT`")
        return loss, metrics

    def _passes(self, units: Sequence[Unit], objective: Objective) -> Iterable[Pass | None]:
        """Return the step's micro-batches, with the reference's logprobs if the objective needs them."""
        factors, share = objective.weight_factors(units), 1.0 / len(units)
        if objective.skips_idle:
            live = [index for index, unit in enumerate(units) if has_gradient(unit)]
            units, factors = [units[i] for i in live], [factors[i] for i in live]
        shares = share, 1.0 / max(trained_tokens(units), 1)
        passes = self._cut(units, factors, shares)
        if (start := self._start) is not None and torch.is_grad_enabled():
            own = [start[id(sample)][1] for unit in units for sample in unit]
            passes = (
                chunk and with_start_logprobs(chunk, [own[row] for row in chunk.rows]) for chunk in passes
            )
        if "reference" not in objective.needs():
            return passes
        passes = list(passes)
        with self.policy.as_base(), torch.no_grad():
            references = [self._run(idle if chunk is None else chunk.logprobs) for chunk in passes]
        return [
            None if chunk is None else replace(chunk, micro=replace(chunk.micro, reference_BT=reference_BT))
            for chunk, reference_BT in zip(passes, references, strict=True)
        ]

    def _cut(
        self, units: Sequence[Unit], factors: Sequence[Sequence[float]] | None, shares: Shares
    ) -> Iterable[Pass | None]:
        """Return this process's part of a step, as token trees or padded; `shares` are of the whole step."""
        rows = trained_units(units, factors)
        tree = PackedStep(rows) if self.options.packing == "tree" else None
        if tree is not None and not (tree.pays and self._takes_trees):
            tree = None
        plain_head = tree is not None or self._has_plain_head
        if self.team.size > 1:
            row = padded_row(rows) if tree is None else tree.row()
            rows = [rows[index] for index in row.part(self.team.rank, self.team.size)]
            tree = None if tree is None else PackedStep(rows)
        given = shares, self.token_budget, self.policy
        passes = padded_passes(rows, *given, plain_head) if tree is None else tree.passes(*given)
        return self.team.in_step(passes)

    def restore(self, folder: Path) -> None:
        """Resume from a saved state that belongs to the weights in memory.

        Raises DamagedError if a file is not as it was written, StoreError if the state does not fit.
        """
        require_as_written(folder / STATE_FILE)
        try:
            position = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
            step, trained = int(position["step"]), int(position["trained"])
        except (OSError, ValueError, KeyError) as error:
            raise StoreError(f"cannot read {folder / STATE_FILE}: {error}") from error
        tensors = load_tensors(folder / OPTIMISER_FILE)
        try:
            self.optimiser.restore(tensors)
        except StoreError as error:
            raise StoreError(f"cannot continue from {folder}: {error}") from error
        self.step, self.trained = step, trained

    def reset(self) -> None:
        """Forget all steps, as for the base model."""
        self.step = self.trained = 0
        self.optimiser.restore({})

    def snapshot(self) -> Snapshot:
        """Return a checkpoint for the leader to write; it is empty elsewhere. All must call it together."""
        weights, optimiser = (
            self.team.whole(tensors) for tensors in (self.policy.trainable(), self.optimiser.tensors())
        )
        return Snapshot(weights, optimiser, self.step, self.trained)


def sample_logprobs(
    policy: Policy, samples: Sequence[Sample], token_budget: int | None = None
) -> list[list[float]]:
    """Return the logprobs [T] of each sample's sampled tokens under a policy, and 0 for the others.

    They belong to the distributions that the tokens were drawn from, under this policy.
    """
    unweighted = [replace(sample, weights=None, advantages=None) for sample in samples]
    found = Learner(policy, LearnerOptions(token_budget=token_budget)).logprobs(unweighted)
    pairs = zip(samples, map(iter, found), strict=True)
    return [[next(own) if sampled else 0.0 for sampled in sample.mask] for sample, own in pairs]
