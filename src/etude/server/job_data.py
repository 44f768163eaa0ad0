"""A job's rows as the learner takes them, and the order of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from etude.algorithms.algorithm import Algorithm
from etude.core.errors import EtudeError, TrainingError
from etude.core.keys import generator
from etude.core.message import Message, Tool
from etude.core.sample import Pair, Sample, Unit
from etude.core.training_rows import DpoRow, GrpoRow, RowMessage, SupervisedRow
from etude.learner.learner import LearnerOptions
from etude.learner.schedule import Schedule
from etude.models.policy import Policy

Units: TypeAlias = tuple[tuple[Sample, ...], ...]
"""What a row gives: one unit, or for a group of grpo one for each trajectory."""


@dataclass(frozen=True, slots=True)
class Step:
    """One optimiser step of a job."""

    number: int
    """From 1 on."""
    epoch: int
    rows: tuple[int, ...]
    ends_epoch: bool


def units_of(
    rows: Iterable[SupervisedRow | DpoRow | GrpoRow], policy: Policy, algorithm: Algorithm
) -> list[Units]:
    """The units of each row. Raises TrainingError with the number of a row that does not fit the model."""
    groups: list[list[Unit]] = []
    for number, row in enumerate(rows, start=1):
        try:
            groups.append([*row.group()] if isinstance(row, GrpoRow) else [_spoken_unit(row, policy)])
        except EtudeError as error:
            raise TrainingError(f"row {number}: {error}") from error
        for sample in (sample for unit in groups[-1] for sample in unit.samples):
            _check(sample, policy, f"row {number}")
    units = iter(algorithm.units(groups)[0])
    return [tuple(next(units) for _ in group) for group in groups]


def learner_options(values: Mapping[str, Any], steps: int) -> LearnerOptions:
    """How a job takes its optimiser steps, each of which is a training of its own."""
    return LearnerOptions(
        learning_rate=values["learning_rate"] * values["learning_rate_multiplier"],
        schedule=Schedule(values["lr_schedule"], values["warmup_steps"], trainings=steps),
        gradient_checkpointing=values["gradient_checkpointing"],
    )


def plan_steps(live: Sequence[bool], epochs: int, batch_size: int, seed: int) -> list[Step]:
    """All steps of a job, shuffled anew for each epoch. The same arguments give the same plan.

    `live` says of each row whether there is something to learn from it; a step of none that have is
    left out. Raises TrainingError when that leaves no step.
    """
    steps: list[Step] = []
    for epoch in range(1, epochs + 1):
        order = list(range(len(live)))
        generator(seed, "epoch", epoch).shuffle(order)
        batches = [tuple(order[at : at + batch_size]) for at in range(0, len(order), batch_size)]
        kept = [rows for rows in batches if any(live[row] for row in rows)]
        for place, rows in enumerate(kept, start=1):
            steps.append(Step(len(steps) + 1, epoch, rows, ends_epoch=place == len(kept)))
    if not steps:
        raise TrainingError(
            "there is nothing to learn from: in every group all rewards are the same, or no token is trained"
        )
    return steps


def has_gradient(units: Units) -> bool:
    """Whether there is something to learn from a row."""
    return any(sequence.has_gradient for unit in units for sequence in unit)


def trained_tokens(units: Units) -> int:
    """Tokens of a row that count in the loss."""
    return sum(1 for unit in units for sequence in unit for weight in sequence.loss_weights if weight)


def batch_of(rows: Iterable[Units]) -> list[tuple[Sample, ...]]:
    """The units of several rows together."""
    return [unit for units in rows for unit in units]


def _spoken_unit(row: SupervisedRow | DpoRow, policy: Policy) -> Unit:
    if isinstance(row, SupervisedRow):
        return _spoken(policy, row.messages, row.tools or ())
    # What the prompt's assistant said is context of both answers.
    prompt = [
        message.model_copy(update={"weight": 0}) if message.role == "assistant" else message
        for message in row.input.messages
    ]
    tools = row.input.tools or ()
    chosen = _spoken(policy, [*prompt, *row.preferred_output], tools)
    return Pair(chosen, _spoken(policy, [*prompt, *row.non_preferred_output], tools))


def _spoken(policy: Policy, messages: Sequence[RowMessage], tools: Sequence[Tool]) -> Sample:
    wire: list[Message] = [message.to_wire() for message in messages]
    ids, sampled = policy.template.transcript(wire, tools)
    return Sample(ids, tuple(map(bool, sampled)))


def _check(sequence: Sample, policy: Policy, where: str) -> None:
    if len(sequence.ids) > policy.max_context:
        raise TrainingError(
            f"{where} has {len(sequence.ids)} tokens, and the model's context ends at {policy.max_context}; "
            "shorten it or leave it out"
        )
    vocabulary = policy.model.get_input_embeddings().num_embeddings
    if max(sequence.ids, default=0) >= vocabulary:
        raise TrainingError(
            f"{where} has token id {max(sequence.ids)}, and the model's vocabulary {vocabulary}; "
            "was it sampled from another model?"
        )
