"""Scoring the stored episodes of a run again, as a config's evaluators see them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from etude.config.builder import Builder
from etude.config.component import EvaluatorConfig
from etude.config.import_path import import_object
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.core.evaluation import EvalOutputItem
from etude.core.keys import content_hash
from etude.core.progress import Progress, Silent
from etude.loop.evaluation_result import Evaluation, Usage
from etude.rewards.rescore import rescore
from etude.store.episodes import choose_phase
from etude.store.run_folder import RunFolder


async def rescore_run(
    config: Config, run: RunFolder, *, phase: str | None = None, progress: Progress | None = None
) -> tuple[str, Evaluation]:
    """The phase that was scored, and its scores. No agent is run, and only models that judge are asked.

    Scores are kept under a label that follows from the evaluators and their code, so that a scoring
    that was stopped goes on, and changed evaluators score anew.
    """
    chosen = choose_phase(run.journal, phase)
    reward = config.finetuning.reward_function.name if config.finetuning.reward_function else None
    progress = progress or Silent()

    def score_made(evaluator: str, item: EvalOutputItem) -> None:
        if evaluator == reward or reward is None:
            progress.scored(item)

    progress.phase("scoring")
    async with Builder(config, run) as builder:
        evaluators = {name: await builder.get_evaluator(name) for name in config.eval.evaluators}
        if not evaluators:
            raise RequestError("the config has no evaluators; add some under 'eval.evaluators'")
        output = await rescore(
            run.journal,
            evaluators,
            phase=chosen,
            label=label_of(config.eval.evaluators),
            error_budget=config.finetuning.error_budget,
            timeout=config.eval.general.timeout,
            max_concurrency=config.eval.general.max_concurrency,
            on_score=score_made,
            keep_episodes=False,
        )
    items = output.eval_input.eval_input_items
    examples, repeat = len({item.id for item in items}), len({item.generation for item in items})
    usage = Usage(episodes=len(items))
    return chosen, Evaluation(output, examples, repeat, False, reward, f"{run.name} ({chosen})", usage)


def label_of(evaluators: Mapping[str, EvaluatorConfig]) -> str:
    """A word for these evaluators as they are now: another one when a setting or their file changes."""
    told = [
        [name, config.type_name, config.model_dump(mode="json"), _code_of(config)]
        for name, config in sorted(evaluators.items())
    ]
    return content_hash(told)


def _code_of(config: EvaluatorConfig) -> str | None:
    function = getattr(config, "function", None)
    if not isinstance(function, str):
        return None
    import_object(function)
    file = sys.modules[function.partition(":")[0]].__file__
    return None if file is None else content_hash(Path(file).read_text(encoding="utf-8"))
