"""The check of a config: everything that training needs, without sampling or loading weights."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.backends.capabilities import (
    LOCAL_CAPABILITIES,
    Capabilities,
    LocalAdapterConfig,
    check_block,
    check_from_base,
    check_method,
    check_opponents,
    check_options,
    check_tokens,
)
from etude.backends.local import check_learners
from etude.config.builder import Builder, TargetBuilder
from etude.config.finetuning import FinetuneConfig, read_transcripts
from etude.config.import_path import is_import_path
from etude.config.schema import Config
from etude.core.call import ChatRequest, Completion
from etude.core.episode import Example, ToolSet
from etude.core.errors import CapabilityError, EngineError
from etude.engines.local import LocalLlmConfig, make_base, require_local_extra
from etude.engines.openai_compatible import OPENAI_URL, OpenAiLlmConfig
from etude.preflight.estimate import Estimate, check_spending, estimate_run, play_some, target_blocks
from etude.preflight.finding import Findings
from etude.processes.pool import number_of_runners
from etude.processes.ray_cluster import require_used
from etude.processes.shipping import config_from_json, config_to_json
from etude.rollout.workflow import AgentConfig
from etude.store.backup import probe
from etude.store.run_folder import RunFolder


class _NoEngine:
    """A stand-in for a model of this process. It samples nothing."""

    async def complete(self, request: ChatRequest) -> Completion:
        raise EngineError("a check samples nothing")


class _DryBuilder(Builder):
    """A builder of everything except the models of this process, which may be large."""

    async def get_llm(self, name: str) -> Any:
        if isinstance(self.config.llms.get(name), LocalLlmConfig):
            return _NoEngine()
        return await super().get_llm(name)


async def check_config(config: Config, *, play: int = 0) -> tuple[Findings, Estimate | None]:
    """Check the agent, examples, evaluators, models, templates and capabilities that a config names.

    If nothing is wrong, also return an estimate of the run, for which `play` episodes are played. Problems
    become findings and never raise.
    """
    findings, finetuning = Findings(), config.finetuning
    # A temporary run folder: components may ask for theirs when they are built.
    with (
        tempfile.TemporaryDirectory(prefix="etude-check-") as folder,
        RunFolder.create(Path(folder), "check") as run,
    ):
        async with _DryBuilder(config, run) as builder:
            missing = [] if config.workflow is None else config.workflow.missing()
            for each in missing:
                findings.fail("needs", each)
            with findings.catch_errors("workflow"):
                if not missing:
                    workflow = await builder.get_workflow()
                    workflow.check(complete=True)
                    kind = "async" if workflow.is_async else "in a thread"
                    findings.ok("workflow", f"{workflow.name} ({workflow.where}), {kind}")
                    for tools in workflow.tool_sets:
                        with findings.catch_errors(f"tools {tools.name}"):
                            await _open_tools(tools, findings)
            for each in config.tools:
                with findings.catch_errors(f"tools {each}"):
                    await _open_tools(await builder.get_tools(each), findings)
            examples = await _examples(builder, finetuning.run_configuration.dataset, "examples", findings)
            held_out = await _held_out(builder, examples, findings)
            if isinstance(config.workflow, AgentConfig):
                with findings.catch_errors("workflow"):
                    for example in (*examples, *held_out):
                        config.workflow.messages(example)
            await _check_evaluators(builder, findings)
            _check_cluster(config, findings)
            if config.storage is not None:
                with findings.catch_errors("storage"):
                    findings.ok("storage", await probe(config.storage))
            await _check_models(builder, findings)
            for name, block in target_blocks(finetuning).items() if finetuning.enabled else ():
                own = builder if name is None else TargetBuilder(builder, name)
                what = f"training {name}" if name else "training"
                await _check_training(own, what, block, examples, findings)
    if not finetuning.enabled:
        findings.warn("finetuning", "not enabled: `etude train` needs `finetuning.enabled: true`")
    check_spending(config, findings)
    played = None
    if play and not findings.has_errors:
        with findings.catch_errors("playing"):
            played = await play_some(config, play, findings)
    if findings.has_errors:
        return findings, None
    return findings, estimate_run(config, len(examples), len(held_out), played)


def _check_cluster(config: Config, findings: Findings) -> None:
    """Check that the agent can be built in other processes, and that the cluster is there."""
    cluster, general = config.cluster, config.eval.general
    on_cluster = cluster is not None and cluster.runners > 0
    if on_cluster or general.isolation == "process":
        with findings.catch_errors("runners"):
            at_head = [name for name, llm in config.llms.items() if isinstance(llm, LocalLlmConfig)]
            config_from_json(config_to_json(config, over_network=on_cluster, at_head=at_head))
            if not on_cluster:
                where = f"{number_of_runners(config)} processes on this machine"
                findings.ok("runners", f"{where}, {general.max_concurrency} episodes at a time")
    if cluster is None:
        return
    with findings.catch_errors("cluster"):
        require_used(cluster, config)
        file = config.finetuning.run_configuration.config_file
        folder = (file.parent if file is not None else Path()).absolute()
        findings.ok("cluster", f"{cluster.check(folder)}; {general.max_concurrency} episodes at a time")


async def _open_tools(tools: ToolSet, findings: Findings) -> None:
    """Open a set of tools as an episode would. Raises ToolError."""
    async with tools.source.open() as session:
        offered = ", ".join(tool["function"]["name"] for tool in session.tools)
    findings.ok(f"tools {tools.name}", offered or "the server offers none")


async def _examples(builder: Builder, source: Any, what: str, findings: Findings) -> list[Example]:
    examples: list[Example] = []
    with findings.catch_errors(what):
        dataset = await builder.get_dataset(source)
        examples = await asyncio.to_thread(dataset.examples)
        columns = sorted({name for example in examples[:100] for name in example.inputs})
        expected = sum(example.expected is not None for example in examples)
        inputs = ", ".join(columns) or "none"
        findings.ok(what, f"{len(examples)}, inputs: {inputs}; {expected} with an answer")
    return examples


async def _held_out(builder: Builder, examples: Sequence[Example], findings: Findings) -> list[Example]:
    """Load the validation examples; none without such a dataset."""
    source, what = builder.config.finetuning.run_configuration.validation_dataset, "validation"
    if source is None:
        findings.warn(
            what,
            "no validation dataset: only the training episodes are measured, and the last version is not. "
            "Add `finetuning.run_configuration.validation_dataset`",
        )
        return []
    held_out = await _examples(builder, source, what, findings)
    count, seen = len(held_out), {_content(example) for example in examples}
    common = sum(_content(example) in seen for example in held_out)
    if common:
        findings.warn(what, f"{common} of {count} examples are also trained on: they are not held out")
    return held_out


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
        with findings.catch_errors(f"evaluator {name}"):
            await builder.get_evaluator(name)
            is_reward = ", the reward" if reward is not None and reward.name == name else ""
            findings.ok(f"evaluator {name}", f"_type: {settings.type_name}{is_reward}")


async def _check_models(builder: Builder, findings: Findings) -> None:
    config = builder.config
    blocks = target_blocks(config.finetuning).values()
    if not config.llms:
        findings.fail("models", "there are none; add one: `llms: {policy: {_type: local, model: …}}`")
    for name, llm in config.llms.items():
        what = f"model {name}"
        if not isinstance(llm, LocalLlmConfig):
            _check_remote(what, llm, findings)
            continue
        with findings.catch_errors(what):
            require_local_extra()
            from etude.preflight.local_model import check_local_model

            own = [block for block in blocks if block.enabled and block.target_model == name]
            adapters = [_find_adapter(config, block) for block in own]
            adapter = next((each for each in adapters if isinstance(each, LocalAdapterConfig)), None)
            with tempfile.TemporaryDirectory() as scratch:
                base = llm.model
                if llm.tiny is not None:
                    await make_base(llm.tiny, name, builder, base := Path(scratch) / "tiny")
                await asyncio.to_thread(check_local_model, what, llm, str(base), adapter, findings)


def _check_remote(what: str, llm: Any, findings: Findings) -> None:
    if not isinstance(llm, OpenAiLlmConfig):
        findings.ok(what, f"_type: {llm.type_name}")
        return
    where = "OpenAI" if llm.address == OPENAI_URL else llm.address
    details = ["token ids"] * llm.asks_for_token_ids + ["logprobs"] * llm.asks_for_logprobs
    if not llm.api_key and not os.environ.get("OPENAI_API_KEY") and where == "OpenAI":
        findings.warn(what, "no api_key in the config and no OPENAI_API_KEY in the environment")
    else:
        request = f"asked for {' and '.join(details)}" if details else "text only"
        findings.ok(what, f"{llm.model_name} at {where}, {request}; it was not asked for an answer")


def _find_adapter(config: Config, block: FinetuneConfig) -> Any:
    return config.trainer_adapters.get(block.trainer_adapter or "")


async def _check_training(
    builder: Builder, what: str, block: FinetuneConfig, examples: Sequence[Example], findings: Findings
) -> None:
    """Build the parts that train, and check that the adapter can do what the config asks."""
    warm_up = block.warm_up
    if warm_up is not None and not is_import_path(warm_up.transcripts):  # A function may ask a model.
        with findings.catch_errors("warm-up"):
            read = await asyncio.to_thread(read_transcripts, warm_up.transcripts, examples, block.seed)
            findings.ok("warm-up", f"{len(read)} transcripts in {warm_up.transcripts}")
    with findings.catch_errors(what):
        trajectories = await builder.get_trajectory_builder(str(block.trajectory_builder))
        await builder.get_trainer(str(block.trainer))
        capabilities = await _capabilities(builder, block)
        kind, target = _find_adapter(builder.config, block).type_name, str(block.target_model)
        backend, settings = f"'{kind}'", trajectories.trajectory_builder_config
        check_method(backend, capabilities, trajectories.method, f"'{settings.type_name}'")
        check_options(backend, capabilities, settings)
        check_block(backend, capabilities, block)
        if block.fine_tune_from_scratch:
            check_from_base(backend, capabilities)
        check_tokens(backend, capabilities, trajectories.method, builder.config.llms[target], target)
        check_opponents(backend, capabilities, builder.config.llms, target)
        # Give it a copy, so that it cannot change the loaded config.
        await trajectories.initialize(block.model_copy(deep=True))
        await trajectories.cleanup()
        findings.ok(what, f"{settings.type_name} data ({trajectories.method}), trained by {kind}")


async def _capabilities(builder: Builder, block: FinetuneConfig) -> Capabilities:
    name, target = str(block.trainer_adapter), str(block.target_model)
    adapter = _find_adapter(builder.config, block)
    if not isinstance(adapter, LocalAdapterConfig):
        capabilities: Capabilities = (await builder.get_trainer_adapter(name)).capabilities()
        return capabilities
    # Building the adapter would load the model.
    require_local_extra()
    llm = builder.config.llms[target]
    if not isinstance(llm, LocalLlmConfig):
        raise CapabilityError(
            f"the trainer adapter 'local' trains models of `_type: local`, and llms.{target} is `_type: "
            f"{llm.type_name}`; make it local, or choose an adapter for its backend"
        )
    check_learners(adapter, builder.config.cluster)
    return LOCAL_CAPABILITIES
