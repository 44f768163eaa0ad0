"""Measuring an agent outside of any run: what reward does it get with this model?"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.core.call import Sampling
from etude.core.evaluation import EvalOutputItem, EvaluationRunOutput
from etude.core.example import Example
from etude.core.interfaces import Engine
from etude.core.stats import Estimate, estimate
from etude.rewards.evaluation_run import EvaluationRun
from etude.rewards.function_evaluator import as_evaluator
from etude.rollout.collector import Collector, Limits
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal


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
    """The mean score of one episode per example, with its 95 % interval. Nothing is kept.

    `workflow` and `evaluator` are functions, decorated or plain. Raises ErrorBudgetExceeded when a
    fifth of the episodes or scores failed.
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
        run = EvaluationRun(
            collector, {"reward": as_evaluator(evaluator)}, journal, max_concurrency=max_concurrency
        )
        output = await run.run(examples, phase="measure", keep_episodes=False)
    return estimate(_scores(output))


def _scores(output: EvaluationRunOutput) -> list[float]:
    items: list[EvalOutputItem] = output.results_of("reward")
    return [item.score for item in items if item.is_scored and item.score is not None]
