"""Checking a config: everything that training would need, without sampling or loading weights."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.algorithms.trajectory_builder import TrajectoryBuilder
from etude.backends.capabilities import (
    Capabilities,
    check_ages,
    check_from_base,
    check_method,
    check_options,
    check_tokens,
)
from etude.backends.local_config import LOCAL_CAPABILITIES, LocalAdapterConfig
from etude.backends.openai_adapter import OpenAiAdapterConfig
from etude.backends.openai_api import JobsConfig
from etude.backends.trainer_adapter import TrainerAdapter
from etude.config.builder import Builder, TargetBuilder
from etude.config.finetuning import FinetuneConfig
from etude.config.schema import Config
from etude.core.call import ChatRequest, Completion
from etude.core.errors import CapabilityError, EngineError, EtudeError
from etude.core.example import Example
from etude.core.interfaces import Engine
from etude.core.job import ModelVersion
from etude.core.stats import estimate
from etude.inference.local import LocalLlmConfig, require_local_extra
from etude.inference.openai_config import OPENAI_URL, OpenAiLlmConfig
from etude.preflight.estimate import Estimate, blocks_of, estimate_run
from etude.preflight.finding import Findings
from etude.preflight.machine import ModelSize, together
from etude.protocols.workflow import ProtocolWorkflow
from etude.rollout.workflow import Workflow
from etude.store.run_folder import RunFolder

_FEW = 50
"""Fewer validation examples than this leave an interval wider than ±0.14."""


@dataclass
class CheckReport:
    """The findings of a check, and an estimate of the run."""

    findings: Findings = field(default_factory=Findings)
    estimate: Estimate | None = None
    """None when something is wrong."""
    trains: bool = False
    """Whether a run would train on anything: it is enabled, and not every epoch would be skipped."""

    @property
    def is_ready(self) -> bool:
        """Whether nothing is wrong; warnings may be there."""
        return not self.findings.of("error")


class _NoEngine:
    """Stands where a model of this process would be. It samples nothing."""

    version = 0

    async def complete(self, request: ChatRequest) -> Completion:
        """Raises EngineError."""
        raise EngineError("a check samples nothing")

    async def adopt(self, version: ModelVersion) -> None:
        """Raises EngineError."""
        raise EngineError("a check adopts nothing")

    async def close(self) -> None:
        """There is nothing to close."""


class _DryBuilder(Builder):
    """Builds everything but the models of this process, which may be large."""

    async def get_llm(self, name: str) -> Engine:
        """The engine of an entry of `llms`; nothing that samples for a local model."""
        if isinstance(self.config.llms.get(name), LocalLlmConfig):
            return _NoEngine()
        return await super().get_llm(name)


async def check_config(config: Config) -> CheckReport:
    """Look at the agent, examples, evaluators, models, templates and capabilities that a config names.

    Nothing raises: what is wrong is among the findings.
    """
    report = CheckReport()
    # A run folder for the duration: components may ask for theirs when they are built.
    with (
        tempfile.TemporaryDirectory(prefix="etude-check-") as folder,
        RunFolder.create(Path(folder), "check") as run,
    ):
        examples, held_out, size = await _look(config, run, report)
    if report.is_ready:
        report.estimate = await asyncio.to_thread(estimate_run, config, examples, held_out, size)
    return report


async def _look(
    config: Config, run: RunFolder, report: CheckReport
) -> tuple[list[Example], list[Example], ModelSize | None]:
    """Examples, held-out examples, and the size of the local model that is trained."""
    findings = report.findings
    async with _DryBuilder(config, run) as builder:
        await _check_workflow(builder, findings)
        examples = await _examples(builder, config.finetuning.run_configuration.dataset, "examples", findings)
        held_out = await _held_out(builder, examples, findings)
        await _check_evaluators(builder, findings)
        size = await _check_models(config, examples, findings)
        if config.finetuning.enabled:
            for name, block in blocks_of(config.finetuning).items():
                own = builder if name is None else TargetBuilder(builder, name)
                what = f"training {name}" if name else "training"
                await _check_training(own, what, block, findings)
                if _check_hosted(own.config, what, block, len(examples), findings):
                    report.trains = True
        else:
            findings.warn(
                "finetuning", "not enabled: `etude train` needs `finetuning.enabled: true`, evaluate does not"
            )
    return examples, held_out, size


async def _check_workflow(builder: Builder, findings: Findings) -> None:
    try:
        workflow: Workflow = await builder.get_workflow()
        workflow.check_complete()
    except EtudeError as error:
        findings.fail("workflow", error)
    else:
        kind = "async" if workflow.is_async else "in a thread"
        findings.ok("workflow", f"{workflow.name} ({workflow.where}), {kind}")
        if isinstance(workflow.fn, ProtocolWorkflow):
            for untried in workflow.fn.protocol.untried:
                findings.warn("protocol", untried)


async def _examples(builder: Builder, source: Any, what: str, findings: Findings) -> list[Example]:
    try:
        dataset = await builder.get_dataset(source)
        examples = await asyncio.to_thread(dataset.examples)
    except EtudeError as error:
        findings.fail(what, error)
        return []
    columns = sorted({name for example in examples[:100] for name in example.inputs})
    expected = sum(example.expected is not None for example in examples)
    findings.ok(what, f"{len(examples)}, inputs: {', '.join(columns) or 'none'}; {expected} with an answer")
    return examples


async def _held_out(builder: Builder, examples: Sequence[Example], findings: Findings) -> list[Example]:
    """The validation examples; none when there is no such dataset."""
    source, what = builder.config.finetuning.run_configuration.validation_dataset, "validation"
    if source is None:
        findings.warn(
            what,
            "no validation dataset: only the training episodes are measured, and the last version is not. "
            "Add `finetuning.run_configuration.validation_dataset`",
        )
        return []
    held_out = await _examples(builder, source, what, findings)
    seen = {_content(example) for example in examples}
    common = sum(_content(example) in seen for example in held_out)
    if common:
        findings.warn(
            what, f"{common} of {len(held_out)} examples are also trained on: they are not held out"
        )
    if 0 < len(held_out) < _FEW:
        findings.warn(
            what,
            f"only {len(held_out)} examples: a reward of 0.5 is known to ±{_precision(len(held_out)):.2f}",
        )
    return held_out


def _precision(count: int) -> float:
    """Half of the 95 % interval where half of so many examples go well."""
    even = estimate([float(index % 2) for index in range(count)])
    return (even.high - even.low) / 2


def _content(example: Example) -> str:
    return repr(sorted(example.inputs.items(), key=str))


async def _check_evaluators(builder: Builder, findings: Findings) -> None:
    config = builder.config
    if not config.eval.evaluators:
        findings.fail(
            "evaluators", "there are none; add some: `eval: {evaluators: {correct: my_agent:correct}}`"
        )
    reward = config.finetuning.reward_function
    for name, settings in config.eval.evaluators.items():
        try:
            await builder.get_evaluator(name)
        except EtudeError as error:
            findings.fail(f"evaluator {name}", error)
        else:
            is_reward = reward is not None and reward.name == name
            findings.ok(
                f"evaluator {name}", f"_type: {settings.type_name}" + (", the reward" if is_reward else "")
            )


async def _check_models(config: Config, examples: Sequence[Example], findings: Findings) -> ModelSize | None:
    """Look at all models; the size of those that are trained here, taken together."""
    sizes: dict[str, ModelSize] = {}
    if not config.llms:
        findings.fail("models", "there are none; add one: `llms: {policy: {_type: local, model: …}}`")
    for name, llm in config.llms.items():
        what = f"model {name}"
        if isinstance(llm, LocalLlmConfig):
            try:
                require_local_extra()
                from etude.preflight.local_model import check_local_model

                sizes[name] = await asyncio.to_thread(
                    check_local_model, what, llm, _adapter_of(config, name), examples, findings
                )
            except EtudeError as error:
                findings.fail(what, error)
        else:
            _check_remote(what, llm, findings)
    trained = [block.target_model for block in blocks_of(config.finetuning).values()]
    return together([size for name, size in sizes.items() if name in trained])


def _check_remote(what: str, llm: Any, findings: Findings) -> None:
    if not isinstance(llm, OpenAiLlmConfig):
        findings.ok(what, f"_type: {llm.type_name}")
        return
    where = "OpenAI" if llm.address == OPENAI_URL else llm.address
    details = ["token ids"] * llm.asks_for_token_ids + ["logprobs"] * llm.asks_for_logprobs
    if llm.api_key is None and not os.environ.get("OPENAI_API_KEY") and where == "OpenAI":
        findings.warn(what, "no api_key in the config and no OPENAI_API_KEY in the environment")
    else:
        request = f"asked for {' and '.join(details)}" if details else "text only"
        findings.ok(what, f"{llm.model_name} at {where}, {request}; whether it answers is not tried")


def _adapter_of(config: Config, model: str) -> LocalAdapterConfig | None:
    """The local adapter that is to train a model; None when nothing trains it in this process."""
    for block in blocks_of(config.finetuning).values():
        adapter = config.trainer_adapters.get(block.trainer_adapter or "")
        if block.enabled and block.target_model == model and isinstance(adapter, LocalAdapterConfig):
            return adapter
    return None


async def _check_training(builder: Builder, what: str, block: FinetuneConfig, findings: Findings) -> None:
    """Build what trains, and compare what is asked for with what the adapter can do."""
    try:
        trajectory_builder: TrajectoryBuilder = await builder.get_trajectory_builder(
            str(block.trajectory_builder)
        )
        await builder.get_trainer(str(block.trainer))
        capabilities, kind = await _capabilities(builder, block)
        made_by = trajectory_builder.trajectory_builder_config.type_name
        check_method(f"'{kind}'", capabilities, trajectory_builder.method, f"'{made_by}'")
        check_options(f"'{kind}'", capabilities, trajectory_builder.trajectory_builder_config)
        check_ages(f"'{kind}'", capabilities, block)
        if block.fine_tune_from_scratch:
            check_from_base(f"'{kind}'", capabilities)
        target = str(block.target_model)
        check_tokens(
            f"'{kind}'", capabilities, trajectory_builder.methods, builder.config.llms[target], target
        )
        # A copy: whatever it writes there, the config stays as it was loaded.
        await trajectory_builder.initialize(block.model_copy(deep=True))
        await trajectory_builder.cleanup()
    except EtudeError as error:
        findings.fail(what, error)
    else:
        findings.ok(what, f"{made_by} data ({trajectory_builder.method}), trained by {kind}")


def _check_hosted(
    config: Config, what: str, block: FinetuneConfig, examples: int, findings: Findings
) -> bool:
    """Warn of what a hosted backend does differently; whether it would train on anything."""
    adapter = config.trainer_adapters.get(block.trainer_adapter or "")
    if not isinstance(adapter, JobsConfig):
        return True
    graded = isinstance(adapter, OpenAiAdapterConfig) and adapter.reinforcement is not None
    if graded:
        findings.warn(
            what,
            "OpenAI's reinforcement fine-tuning samples and grades by itself: the run's answers and rewards "
            "are measured, and only its prompts are trained on",
        )
    builder: Any = config.trajectory_builders.get(block.trajectory_builder or "")
    groups = min(getattr(builder, "examples_per_epoch", None) or examples, examples)
    in_groups = graded or builder.type_name == "grpo"
    rows = groups * (1 if in_groups else getattr(builder, "num_generations", 1))
    enough = builder.type_name not in ("grpo", "expert_iteration") or rows >= adapter.min_rows
    if not enough:
        findings.warn(
            what,
            f"an epoch makes {rows} rows at most, and jobs need {adapter.min_rows}: every epoch would be "
            "skipped. Raise examples_per_epoch or num_generations of the builder",
        )
    return enough


async def _capabilities(builder: Builder, block: FinetuneConfig) -> tuple[Capabilities, str]:
    config, name, target = builder.config, str(block.trainer_adapter), str(block.target_model)
    adapter_config = config.trainer_adapters[name]
    if not isinstance(adapter_config, LocalAdapterConfig):
        adapter: TrainerAdapter = await builder.get_trainer_adapter(name)
        return adapter.capabilities(), adapter_config.type_name
    # Building it would load the model.
    require_local_extra()
    if not isinstance(config.llms[target], LocalLlmConfig):
        raise CapabilityError(
            f"the trainer adapter 'local' trains models of `_type: local`, and llms.{target} is `_type: "
            f"{config.llms[target].type_name}`; make it local, or choose an adapter for its backend"
        )
    return LOCAL_CAPABILITIES, adapter_config.type_name
