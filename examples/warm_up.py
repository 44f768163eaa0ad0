"""Warm-up: a policy learns a task's format by imitation, until a measured value says that it has.

How many steps that takes differs a lot from seed to seed, so it is never a number of steps that ends it.
The examples make their base models so; in a run of your own `finetuning.warm_up` does it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from etude.algorithms.imitation import Supervised
from etude.core.call import Sampling
from etude.core.episode import Example
from etude.core.errors import TrainingError
from etude.core.interfaces import Engine
from etude.core.keys import shuffled_forever
from etude.core.message import Message, Tool
from etude.core.sample import Sample
from etude.core.stats import Estimate, estimate
from etude.learner.learner import Learner, LearnerOptions
from etude.learner.optimiser import plan_steps
from etude.models.policy import Policy
from etude.models.template import ChatTemplate
from etude.rollout.collector import Collector, Limits
from etude.rollout.evaluation import JournalledEvaluation
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal

OnCheck = Callable[[str, float], None]
"""Is called with the stage's name and the value of each measurement."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Transcripts to imitate, and the value that ends it."""

    name: str
    transcripts: Sequence[Sequence[Message]]
    """Finished conversations in OpenAI's format; gone through again and again, shuffled each time."""
    measure: Callable[[], Awaitable[float]] | None = None
    """Measures the policy as it is now; None takes the loss: nats per token that the assistant said, over the
    steps since the last check."""
    at_least: float | None = None
    """The stage goes on until what is measured has risen to this …"""
    at_most: float | None = None
    """… or fallen to this; with both, until it lies between them."""
    tools: Sequence[Tool] = ()
    """The tools that the assistant was offered."""
    options: LearnerOptions = field(default_factory=lambda: LearnerOptions(learning_rate=3e-3))
    batch_size: int = 32
    """Transcripts of an optimiser step."""
    check_interval: int = 20
    """Optimiser steps from one check to the next."""
    first_check: int = 0
    """Steps before which nothing is measured: what is known to be out of reach that early."""
    max_steps: int = 5000
    """Steps after which the target counts as out of reach."""

    def __post_init__(self) -> None:
        """Raises ValueError for a stage that nothing ends, and for one without transcripts."""
        if self.at_least is None and self.at_most is None:
            raise ValueError(f"nothing ends warm-up stage '{self.name}'; set at_least or at_most")
        if not self.transcripts:
            raise ValueError(f"warm-up stage '{self.name}' has no transcripts")

    def is_over(self, value: float) -> bool:
        """Whether a measurement ends the stage."""
        high_enough = self.at_least is None or value >= self.at_least
        return high_enough and (self.at_most is None or value <= self.at_most)


@dataclass(frozen=True, slots=True)
class StageReport:
    """The steps and time that a stage took, and the reward that it reached."""

    name: str
    steps: int
    value: float
    """The last measurement: of `measure`, or the loss."""
    loss: float
    """Nats per token over the last steps."""
    seconds: float


async def measure(
    workflow: Any,
    evaluator: Any,
    engine: Engine,
    examples: Sequence[Example],
    *,
    seed: int = 0,
    sampling: Sampling | None = None,
    max_concurrency: int = 64,
) -> Estimate:
    """Return the mean score of one episode per example, with its 95 % interval. Nothing is kept.

    `workflow` and `evaluator` are functions, decorated or plain. Raises ErrorBudgetExceeded if over a fifth
    of the episodes or scores failed.
    """
    with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "measure.db") as journal:
        collector = Collector(
            as_workflow(workflow),
            {"policy": engine},
            journal,
            seed=seed,
            limits=Limits(max_concurrency=max_concurrency),
            sampling={"policy": sampling or Sampling()},
        )
        run = JournalledEvaluation(collector, {"reward": evaluator}, journal, max_concurrency=max_concurrency)
        output = await run.run(examples, phase="measure", keep_episodes=False)
    return estimate(output.scores()["reward"], output.bounds()["reward"])


async def warm_up(
    policy: Policy, stages: Sequence[Stage], *, seed: int, on_check: OnCheck = lambda name, value: None
) -> tuple[StageReport, ...]:
    """Train `policy` by imitation, stage after stage, each until its target is reached.

    The weights stay version 0: what comes out is a base model. Raises TrainingError when a target is
    not reached within the stage's `max_steps`, saying what was.
    """
    return tuple([await _run(policy, stage, seed, on_check) for stage in stages])


async def _run(policy: Policy, stage: Stage, seed: int, on_check: OnCheck) -> StageReport:
    start = time.monotonic()
    learner = Learner(policy, stage.options)
    order = shuffled_forever(len(stage.transcripts), seed, "warm-up")
    made: dict[int, Sample] = {}
    while learner.step < stage.max_steps:
        numbers = [*islice(order, stage.check_interval * stage.batch_size)]
        samples = _samples(numbers, made, policy.template, stage)
        loss = await asyncio.to_thread(_imitate, learner, samples, stage.batch_size, seed)
        policy.mark_changed(policy.version)
        if learner.step < min(stage.first_check, stage.max_steps):
            continue
        value = loss if stage.measure is None else await stage.measure()
        on_check(stage.name, value)
        if stage.is_over(value):
            return StageReport(stage.name, learner.step, value, loss, time.monotonic() - start)
    what = "the loss" if stage.measure is None else "the measured value"
    bounds = [("at least", stage.at_least), ("at most", stage.at_most)]
    wanted = " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    raise TrainingError(
        f"warm-up stage '{stage.name}' did not reach its goal: after {stage.max_steps} steps {what} is "
        f"{value:.3f}, and should be {wanted}; ask for less, take a larger model, or raise max_steps"
    )


def _imitate(learner: Learner, samples: Sequence[Sample], batch_size: int, seed: int) -> float:
    """Take the steps from one check to the next; the mean of their losses."""
    losses = []
    for step in plan_steps([True] * len(samples), 1, batch_size, seed, "pass", learner.step):
        units = [(samples[row],) for row in step.rows]
        losses.append(learner.take_step(units, Supervised(), step.part)["nll"])
    learner.end_training()
    return sum(losses) / len(losses)


def _samples(
    numbers: Sequence[int], made: dict[int, Sample], template: ChatTemplate, stage: Stage
) -> list[Sample]:
    """Some transcripts as samples, in which the assistant's tokens count; `made` keeps them by number.

    They are rendered when their turn comes: most stages end before all have had one. Raises RequestError for
    a conversation that the template cannot extend.
    """
    for number in numbers:
        if number not in made:
            ids, spoken = template.transcript(stage.transcripts[number], stage.tools)
            made[number] = Sample(ids, spoken)
    return [made[number] for number in numbers]


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    """Write a dataset, a line for each example."""
    path.parent.mkdir(parents=True, exist_ok=True)
    answers = [{} if one.expected is None else {"answer": one.expected} for one in examples]
    rows = [{"id": one.id, **one.inputs, **answer} for one, answer in zip(examples, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def command(build_base: Callable[[Path, int, OnCheck], Awaitable[Sequence[StageReport]]], out: Path) -> None:
    """The command line of a `base.py`. By default it writes into `out`."""
    parser = argparse.ArgumentParser(description="Makes the data and the base models of an example.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=out)
    given = parser.parse_args()

    async def build() -> Sequence[StageReport]:
        return await build_base(given.out, given.seed, lambda what, value: print(f"{what}: {value:.3f}"))

    for done in asyncio.run(build()):
        print(f"{done.name}: {done.value:.3f} after {done.steps} steps, {done.seconds:.0f} s")
