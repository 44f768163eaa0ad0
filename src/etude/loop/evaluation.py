"""Evaluations of an agent, also with models of stored runs, and new scores for stored episodes."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import shlex
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from etude.backends.trainer_adapter import LocalAdapterConfig, find_opponents
from etude.config.builder import Builder
from etude.config.component import EvaluatorConfig
from etude.config.document import Override
from etude.config.import_path import import_object
from etude.config.schema import Config
from etude.core.data_model import finite
from etude.core.episode import EpisodeRecord, Example, LoggedExample
from etude.core.errors import RequestError
from etude.core.evaluation import EvalOutput, EvaluationRunOutput
from etude.core.interfaces import Engine, Progress, innermost
from etude.core.keys import content_hash
from etude.core.records import RunEnded
from etude.engines.ledger import Ledger, within_budget
from etude.engines.local import LocalLlmConfig, base_folder, require_local_extra
from etude.engines.meter import MeteredEngine
from etude.groups.opponents import OpponentPool
from etude.loop.metrics import measured_scores
from etude.models.source import local_path, require_base
from etude.rollout.evaluation import OnScore, rescore
from etude.runtime import Runtime, open_runtime
from etude.store.episodes import EVALUATION, choose_phase
from etude.store.facts import RunVersion, choose_version, version_name
from etude.store.files import WEIGHTS_FILE, DamagedError, damage_in, write_atomically
from etude.store.histories import read_histories
from etude.store.journal import ModelLog
from etude.store.run_folder import RunFolder
from etude.store.stored_config import EvaluationRequest, model_config

if TYPE_CHECKING:
    from etude.models.policy import Policy

_LOG = logging.getLogger("etude.versions")

_NO_USAGE = {"episodes": 0, "calls": 0, "prompt_tokens": 0, "completion_tokens": 0}


@dataclass(frozen=True, slots=True)
class EvaluationScores:
    """The scores of an evaluation."""

    output: EvaluationRunOutput
    examples: int
    repeat: int
    greedy: bool
    reward: str | None
    """The evaluator whose score is the reward."""
    model: str
    usage: Mapping[str, int]
    """`episodes`, their `calls`, `prompt_tokens` and `completion_tokens`."""

    def scores(self) -> dict[str, dict[str, Any]]:
        """Return by evaluator: `mean`, `low`, `high` (95 %), `n` examples, `scored` and `unscored` episodes,
        and its declared `bounds`."""
        return {name: score_statistics(result) for name, result in self.output.evaluation_results}

    def as_json(self) -> dict[str, Any]:
        """Return everything but the items, as JSON."""
        return {
            **{key: getattr(self, key) for key in ("model", "examples", "repeat", "greedy", "reward")},
            "scores": self.scores(),
            **self.output.model_dump(include={"failures", "causes"}),
            "model_calls": dict(self.output.calls),
            "remote": self.output.remote(),
            **self.usage,
        }


def score_statistics(result: EvalOutput) -> dict[str, Any]:
    """Return the mean and 95 % interval of an evaluator's scores; None if nothing was scored.

    The interval is computed from the examples' means, since episodes of one example are not independent.
    """
    items, by_example = result.eval_output_items, defaultdict[str, list[float]](list)
    for item in items:
        if item.is_scored and item.score is not None:
            by_example[item.id].append(item.score)
    scored = sum(map(len, by_example.values()))
    counts = {"n": len(by_example), "scored": scored, "unscored": len(items) - scored}
    means = [math.fsum(scores) / len(scores) for scores in by_example.values()]
    return measured_scores(means, result.bounds) | counts


def item_rows(output: EvaluationRunOutput) -> list[dict[str, Any]]:
    """Return a row per episode: `id`, `generation`, `output`, `expected`, `scores`, `reasoning`, `errors`."""
    rows = []
    for index, item in enumerate(output.eval_input.eval_input_items):
        scored = [(name, result.eval_output_items[index]) for name, result in output.evaluation_results]
        row = {
            "id": item.id,
            "generation": item.generation,
            "output": item.output_obj,
            "expected": item.expected_output_obj,
            "scores": {name: score.score for name, score in scored},
            "reasoning": {name: score.reasoning for name, score in scored if score.reasoning is not None},
            "errors": {name: score.error for name, score in scored if score.error is not None},
        }
        rows.append(row)
    return rows


async def measure(
    runtime: Runtime,
    examples: Sequence[Example],
    *,
    model: str,
    phase: str = EVALUATION,
    repeat: int = 1,
    greedy: bool = False,
) -> EvaluationScores:
    """Run `repeat` episodes on each example and score them. Raises ErrorBudgetExceeded when too many fail."""
    usage, progress, reward = dict(_NO_USAGE), runtime.progress, runtime.builder.config.finetuning.reward_name

    def count_usage(record: EpisodeRecord) -> None:
        usage["episodes"] += 1
        usage["calls"] += len(record.calls)
        usage["prompt_tokens"] += record.usage.prompt_tokens
        usage["completion_tokens"] += record.usage.completion_tokens
        progress.episode_finished(record)

    progress.phase("evaluating", len(examples) * repeat)
    output = await runtime.evaluation.run(
        examples,
        phase=phase,
        generations=repeat,
        sampling={"temperature": 0.0} if greedy else None,
        on_episode=count_usage,
        on_score=_telling(progress, reward),
        keep_episodes=False,
    )
    return EvaluationScores(output, len(examples), repeat, greedy, reward, model, usage)


async def evaluate(
    config: Config, run: RunFolder, request: EvaluationRequest, *, progress: Progress | None = None
) -> EvaluationScores:
    """Carry out an evaluation request, or continue it from the run folder.

    It uses the validation examples if the config has any, else the training examples. The result is recorded,
    and `items.jsonl` in the run folder has a line for each episode. The config's output folder gets both as
    files. Raises RequestError when that is not possible, and another EtudeError when the work failed.
    """
    version, engines = None, dict[str, Engine]()
    if request.run is not None:
        version = choose_version(Path(request.run), version_name(request.version, request.target))
    async with AsyncExitStack() as exits:
        target = replaced_model(config, version)
        opponents = find_opponents(config.llms, target)
        if version is not None and target is not None and isinstance(config.llms[target], LocalLlmConfig):
            versions = {target: version, **dict.fromkeys(opponents, _origin(version))}
            for name, played in versions.items():
                engines[name] = await load_version_engine(config, target, played)
                exits.push_async_callback(engines[name].close)
        runtime = await exits.enter_async_context(
            open_runtime(config, run, progress=progress, engines=engines)
        )
        if version is not None and not engines and version.version is not None:
            await runtime.engines[target or runtime.target_model].adopt(version.version)
            for name in opponents:
                cast("OpponentPool", innermost(runtime.engines[name])).outside = _origin(version).version
        llm: Any = config.llms.get(config.finetuning.target_model or "")
        model = getattr(llm, "model", None) or getattr(llm, "model_name", None) or "the config's models"
        examples = runtime.validation_examples or runtime.examples
        if logged := next((one for one in examples if isinstance(one, LoggedExample)), None):
            raise RequestError(
                f"the examples are logged episodes, which no model plays again: score them with `--rescore "
                f"{logged.origin}`, or name others as 'finetuning.run_configuration.validation_dataset'"
            )
        evaluation = await measure(
            runtime,
            examples,
            model=str(model if version is None else version),
            repeat=request.repeat,
            greedy=request.greedy,
        )
        result: dict[str, Any] = finite({"run_id": run.name, **evaluation.as_json()})
        lines = [
            json.dumps(finite(row), ensure_ascii=False, default=str) for row in item_rows(evaluation.output)
        ]
        for folder in filter(None, (run.path, output_dir := config.eval.general.output_dir)):
            write_atomically(folder / "items.jsonl", "".join(f"{line}\n" for line in lines))
        if output_dir is not None:
            text = json.dumps(result, indent=2, ensure_ascii=False)
            write_atomically(output_dir / "evaluation.json", f"{text}\n")
        log = ModelLog(run.journal)
        if log.state.end is None:
            await log.add(RunEnded(result=result))
    return evaluation


def _origin(version: RunVersion) -> RunVersion:
    return replace(version, version=read_histories(version.run)[version.target].start)


async def load_version_engine(config: Config, model: str, version: RunVersion) -> Engine:
    """Return an engine with stored weights and the settings of the config's entry `model`."""
    from etude.engines.embedded import EmbeddedEngine

    policy = await asyncio.to_thread(load_version, version)
    llm = config.llms[model]
    assert isinstance(llm, LocalLlmConfig)
    return EmbeddedEngine(policy, max_tokens=llm.max_tokens, deterministic=config.finetuning.deterministic)


async def rescore_run(
    config: Config, run: RunFolder, *, phase: str | None = None, progress: Progress | None = None
) -> tuple[str, EvaluationScores]:
    """Score the stored episodes of a run's phase, by default the latest, with a config's evaluators.

    No agent runs, and only models that judge are called. Scores are stored under a label made from the
    evaluators and their code. So an interrupted scoring continues, and changed evaluators score again.
    Returns the phase and its scores.
    """
    phase, progress = choose_phase(run.journal, phase), progress or Progress()
    reward = config.finetuning.reward_name
    progress.phase("scoring")
    ledger = Ledger(run.journal, config.llms, config.budget)
    meter = partial(MeteredEngine, account=ledger, llms=config.llms)
    async with Builder(config, run, wrap_llm=meter) as builder, within_budget(ledger, progress):
        evaluators = {name: await builder.get_evaluator(name) for name in config.eval.evaluators}
        if not evaluators:
            raise RequestError("the config has no evaluators; add some under 'eval.evaluators'")
        # The label changes with the evaluators' settings and files.
        label = content_hash(
            [
                [name, each.type_name, each.model_dump(mode="json"), _function_code(each)]
                for name, each in sorted(config.eval.evaluators.items())
            ]
        )
        output = await rescore(
            run.journal,
            evaluators,
            phase=phase,
            label=label,
            error_budget=config.finetuning.error_budget,
            timeout=config.eval.general.timeout,
            max_concurrency=config.eval.general.max_concurrency,
            on_score=_telling(progress, reward),
            keep_episodes=False,
        )
    items = output.eval_input.eval_input_items
    examples, repeat = len({item.id for item in items}), len({item.generation for item in items})
    usage = {**_NO_USAGE, "episodes": len(items)}
    return phase, EvaluationScores(output, examples, repeat, False, reward, f"{run.name} ({phase})", usage)


def _telling(progress: Progress, reward: str | None) -> OnScore:
    """Return a callback that reports the reward's scores, or all scores if there is no reward."""
    return lambda evaluator, item: progress.scored(item) if reward in (evaluator, None) else None


def _function_code(config: EvaluatorConfig) -> str | None:
    function = getattr(config, "function", None)
    if not isinstance(function, str):
        return None
    import_object(function)
    file = sys.modules[function.partition(":")[0]].__file__
    return None if file is None else content_hash(Path(file).read_text(encoding="utf-8"))


def load_version(wanted: RunVersion) -> Policy:
    """Load the run's local model with the weights of version `wanted`, on the device from its config.
    Raises RequestError or EngineError when the model is not local, or its base or weights are not those
    of the run."""
    config = model_config(wanted.run, wanted.target)
    target = config.finetuning.target_model
    llm = config.llms.get(target) if target is not None else None
    if not isinstance(llm, LocalLlmConfig):
        kind = "of no known type" if llm is None else f"`_type: {llm.type_name}`"
        problem = f"the model of run {wanted.run.name} is {kind}; only the weights of `_type: local` are here"
        if wanted.version is not None:
            problem += (
                f". {wanted} is the model '{wanted.version.location}' of its backend: ask for that name. "
                "A language-model server sends it at /export/NAME"
            )
        raise RequestError(problem)
    require_local_extra()
    from etude.models.policy import Policy

    base, name, run = str(llm.model), str(config.finetuning.target_model), shlex.quote(str(wanted.run))
    if llm.tiny:
        folder = base_folder(wanted.run, name)
        if damage := damage_in(folder):
            raise RequestError(
                f"{folder} is damaged: {'; '.join(damage)}; it is made again by: etude resume {run}"
            )
        base = str(folder)
    else:
        with RunFolder.read(wanted.run) as opened:
            require_base(opened.journal, name, base)
    policy = Policy.load(base, **llm.loading)
    adapter = next(iter(config.trainer_adapters.values()), None)
    if wanted.version is None:
        return policy
    if isinstance(adapter, LocalAdapterConfig) and adapter.lora is not None:
        policy.use_lora(adapter.lora, seed=0)
    policy.keep_base()
    kept, wish = wanted.folder, str(wanted).removeprefix(f"{wanted.run.name}:")
    location = wanted.version.location if kept is None else str(kept)
    try:
        policy.adopt(wanted.version.model_copy(update={"location": location}))
    except DamagedError as error:
        text = f"{error}; it is trained again by: etude export {run} --version {wish}"
        raise RequestError(text) from error
    if kept is not None and (damage := damage_in(kept, without=WEIGHTS_FILE)):
        _LOG.warning("the weights of %s are whole, and other files are not: %s", wanted, "; ".join(damage))
    return policy


def model_overrides(config: Config, text: str, wanted: RunVersion | None) -> list[Override]:
    """Return the overrides that make `text` the target model: a folder, a name, or a version of a run, whose
    weights are adopted later. Raises RequestError when it is not clear which of the models is replaced."""
    target = replaced_model(config, wanted)
    if target is None:
        several = ", ".join(config.llms) or "none"
        raise RequestError(
            f"model: the config has several models ({several}); name one as 'finetuning.target_model'"
        )
    llm = config.llms[target]
    if wanted is not None:
        base = model_config(wanted.run, wanted.target)
        trained = base.llms.get(base.finetuning.target_model or "")
        if isinstance(trained, LocalLlmConfig) and isinstance(llm, LocalLlmConfig):
            name = str(base.finetuning.target_model)
            source = base_folder(wanted.run, name).absolute() if trained.tiny else trained.model
            return _replace_model(target, llm, str(source))
        if trained is not None and trained.type_name == llm.type_name:
            return []
        raise RequestError(
            f"model {text}: that run trained a model of another kind than llms.{target} "
            f"(`_type: {llm.type_name}`); use the run's own config"
        )
    if isinstance(llm, LocalLlmConfig):
        folder = local_path(text)
        return _replace_model(target, llm, text if folder is None else str(folder.absolute()))
    if "model_name" in type(llm).model_fields:
        return [Override(("llms", target, "model_name"), text, "model")]
    raise RequestError(f"model: llms.{target} (`_type: {llm.type_name}`) has no key for a model's name")


def replaced_model(config: Config, wanted: RunVersion | None) -> str | None:
    """Return the entry of `llms` that the given model replaces, or None if that is not clear."""
    targets = config.finetuning.targets
    if wanted is not None and wanted.target in targets:
        return targets[wanted.target].model
    return config.finetuning.target_model


def _replace_model(target: str, llm: LocalLlmConfig, source: str) -> list[Override]:
    """Return the overrides with which a local model loads another one."""
    values = {"model": source} if llm.tiny is None else {"model": source, "tiny": None}
    return [Override(("llms", target, key), value, "model") for key, value in values.items()]
