"""Running an evaluation: the agent on examples, as in training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from etude.config.schema import Config
from etude.core.episode import EpisodeRecord
from etude.core.evaluation import EvalOutputItem
from etude.core.example import Example
from etude.core.numbers import finite
from etude.core.progress import Progress
from etude.inference.engine import Engine
from etude.inference.local import LocalLlmConfig
from etude.loop.evaluation_result import Evaluation, Usage, item_rows
from etude.loop.wished_model import replaced_model
from etude.runtime import Runtime, open_runtime
from etude.store.files import write_atomically
from etude.store.phases import EVALUATION
from etude.store.request import RESULT, EvaluationRequest
from etude.store.run_folder import RunFolder
from etude.store.versions import RunVersion, choose_version


async def measure(
    runtime: Runtime,
    examples: Sequence[Example],
    *,
    model: str,
    phase: str = EVALUATION,
    repeat: int = 1,
    greedy: bool = False,
) -> Evaluation:
    """Run `repeat` episodes on each example and score them.

    Raises ErrorBudgetExceeded when too many fail. Everything is journalled: the same phase again costs
    nothing.
    """
    finetuning, usage, progress = runtime.config.finetuning, Usage(), runtime.progress
    reward = finetuning.reward_function.name if finetuning.reward_function else None

    def finished(record: EpisodeRecord) -> None:
        usage.add(record)
        progress.episode_finished(record)

    def score_made(evaluator: str, item: EvalOutputItem) -> None:
        if evaluator == reward or reward is None:
            progress.scored(item)

    progress.phase("evaluating", len(examples) * repeat)
    output = await runtime.evaluation.run(
        examples,
        phase=phase,
        generations=repeat,
        sampling={"temperature": 0.0} if greedy else None,
        on_episode=finished,
        on_score=score_made,
        keep_episodes=False,
    )
    return Evaluation(output, len(examples), repeat, greedy, reward, model, usage)


async def evaluate(
    config: Config, run: RunFolder, request: EvaluationRequest, *, progress: Progress | None = None
) -> Evaluation:
    """Evaluate as the request says, or go on with what the run folder has of it already.

    On the validation examples where the config has any, else on the training examples. Raises
    RequestError when that cannot be done, and another EtudeError when the work failed.
    """
    async with AsyncExitStack() as exits:
        engines: dict[str, Engine] = {}
        wanted = wanted_version(request)
        target = replaced_model(config, wanted)
        if wanted is not None and target is not None and isinstance(config.llms[target], LocalLlmConfig):
            engines[target] = await engine_of(config, target, wanted)
            exits.push_async_callback(engines[target].close)
        runtime = await exits.enter_async_context(
            open_runtime(config, run, progress=progress, engines=engines)
        )
        if wanted is not None and not engines and wanted.version is not None:
            await runtime.engines[target or runtime.target_model].adopt(wanted.version)
        evaluation = await measure(
            runtime,
            runtime.validation_examples or runtime.examples,
            model=str(wanted) if wanted is not None else _model_name(config),
            repeat=request.repeat,
            greedy=request.greedy,
        )
    write_result(evaluation, config, run)
    return evaluation


def wanted_version(request: EvaluationRequest) -> RunVersion | None:
    """The stored version that a request is about; None when the config's own model is meant."""
    if request.run is None:
        return None
    whose = "" if request.target is None else f"{request.target}:"
    return choose_version(Path(request.run), f"{whose}v{request.version or 0}")


async def engine_of(config: Config, model: str, wanted: RunVersion) -> Engine:
    """An engine with stored weights, that samples as the entry `model` of the config says."""
    from etude.inference.embedded import EmbeddedEngine
    from etude.loop.stored_policy import load_version

    policy = await asyncio.to_thread(load_version, wanted)
    llm = config.llms[model]
    assert isinstance(llm, LocalLlmConfig)
    return EmbeddedEngine(
        policy,
        max_batch=llm.max_batch,
        max_tokens=llm.max_tokens,
        deterministic=config.finetuning.deterministic,
    )


def _model_name(config: Config) -> str:
    llm: Any = config.llms.get(config.finetuning.target_model or "")
    return str(getattr(llm, "model", None) or getattr(llm, "model_name", None) or "the config's models")


def write_result(evaluation: Evaluation, config: Config, run: RunFolder) -> None:
    """The result and a line for each episode: in the run folder, and where the config says."""
    result: Mapping[str, Any] = finite({"run_id": run.name, **evaluation.as_json()})
    lines = [json.dumps(finite(row), ensure_ascii=False, default=str) for row in item_rows(evaluation.output)]
    for folder in dict.fromkeys((run.path, config.eval.general.output_dir or run.path)):
        write_atomically(folder / "items.jsonl", "".join(f"{line}\n" for line in lines))
        write_atomically(folder / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")
