"""The checks of a config, without sampling or loading weights; and of the installation and its services."""

import asyncio
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from etude.algorithms.collecting import Collecting
from etude.backends.local import check_local
from etude.backends.trainer_adapter import LOCAL_CAPABILITIES, LocalAdapterConfig, check_run
from etude.config.builder import Builder, TargetBuilder
from etude.config.finetuning import FinetuneConfig, read_transcripts
from etude.config.import_path import is_import_path, user_code
from etude.config.schema import Config
from etude.core.call import ChatRequest, Completion, Sampling
from etude.core.episode import Example, ToolSet
from etude.core.errors import EngineError, EtudeError, StoreError, install_command
from etude.core.keys import content_hash
from etude.engines.local import LocalLlmConfig, make_base, require_local_extra
from etude.engines.openai_compatible import OPENAI_URL, OpenAiEngine, OpenAiLlmConfig
from etude.models.device import available_memory, choose_device, shown_bytes, usable_cores
from etude.preflight.estimate import RunEstimate, check_spending, estimate_run, play_some, target_blocks
from etude.preflight.finding import Findings
from etude.processes.pool import number_of_runners
from etude.processes.ray_cluster import require_used
from etude.processes.shipping import config_from_json, config_to_json
from etude.rollout.workflow import AgentConfig
from etude.runtime import Runtime
from etude.store.backup import probe
from etude.store.episodes import encode_example
from etude.store.run_folder import RunFolder, temporary_run


class _NoEngine:
    """A stand-in for a model of this process. It samples nothing."""

    async def complete(self, request: ChatRequest) -> Completion:
        raise EngineError("a check samples nothing")

    async def score(self, ids: Sequence[int]) -> tuple[float, ...]:
        return (0.0,) * len(ids)


async def check_config(config: Config, *, play: int = 0) -> tuple[Findings, RunEstimate | None]:
    """Check the agent, examples, evaluators, models, templates and capabilities that a config names.

    If nothing is wrong, also estimate the run, for which `play` episodes are played. Problems never raise.
    """
    findings, finetuning = Findings(), config.finetuning
    for output_dir in filter(None, (finetuning.output_dir, config.eval.general.output_dir)):
        with findings.catch_errors("output_dir"):
            _require_writable(output_dir)
    # Models of this process may be large.
    local: Any = {name: _NoEngine() for name, llm in config.llms.items() if isinstance(llm, LocalLlmConfig)}
    # Components may ask for their run's folder when they are built.
    with temporary_run("check") as run:
        async with Builder(config, run, local) as builder:
            with findings.catch_errors("workflow"):
                await _check_workflow(builder, findings)
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
                target_builder = builder if name is None else TargetBuilder(builder, name)
                what = f"training {name}" if name else "training"
                await _check_training(target_builder, what, block, examples, findings)
    if not finetuning.enabled:
        findings.warn("finetuning", "not enabled: `etude train` needs `finetuning.enabled: true`")
    check_spending(config, findings)
    played = None
    if play and not findings.has_errors:
        with findings.catch_errors("playing"):
            played = await play_some(config, play, findings)
    if findings.has_errors:
        return findings, None
    return findings, estimate_run(config, examples, len(held_out), played)


async def _check_workflow(builder: Builder, findings: Findings) -> None:
    """Check the agent, and open its tools. Raises what building it raises."""
    config = builder.config.workflow
    if config is not None and (missing := config.missing()):
        for each in missing:
            findings.fail("needs", each)
        return
    workflow = await builder.get_workflow()
    workflow.check(complete=True)
    kind = "async" if workflow.is_async else "in a thread"
    findings.ok("workflow", f"{workflow.name} ({workflow.where}), {kind}")
    for tools in workflow.tool_sets:
        with findings.catch_errors(f"tools {tools.name}"):
            await _open_tools(tools, findings)


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
        examples = await asyncio.to_thread((await builder.get_dataset(source)).examples)
        expected = sum(example.expected is not None for example in examples)
        inputs = ", ".join(sorted({name for example in examples[:100] for name in example.inputs})) or "none"
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
    with findings.catch_errors(what), user_code(EtudeError, "the examples cannot be stored as JSON"):
        trained = {content_hash(encode_example(each)["inputs"]) for each in examples}
        if common := sum(content_hash(encode_example(each)["inputs"]) in trained for each in held_out):
            findings.warn(
                what, f"{common} of {len(held_out)} examples are also trained on: they are not held out"
            )
    return held_out


async def _check_evaluators(builder: Builder, findings: Findings) -> None:
    config = builder.config
    if not config.eval.evaluators:
        findings.fail(
            "evaluators", "there are none; add some: `eval: {evaluators: {correct: my_agent:correct}}`"
        )
    for name, settings in config.eval.evaluators.items():
        with findings.catch_errors(f"evaluator {name}"):
            await builder.get_evaluator(name)
            is_reward = ", the reward" if config.finetuning.reward_name == name else ""
            findings.ok(f"evaluator {name}", f"_type: {settings.type_name}{is_reward}")


async def _check_models(builder: Builder, findings: Findings) -> None:
    config = builder.config
    blocks = target_blocks(config.finetuning).values()
    if not config.llms:
        findings.fail("models", "there are none; add one: `llms: {policy: {_type: local, model: …}}`")
    for name, llm in config.llms.items():
        what = f"model {name}"
        if isinstance(llm, OpenAiLlmConfig):
            where = "OpenAI" if llm.address == OPENAI_URL else llm.address
            details = ["token ids"] * llm.asks_for_token_ids + ["logprobs"] * llm.asks_for_logprobs
            if not llm.api_key and not os.environ.get("OPENAI_API_KEY") and where == "OpenAI":
                findings.warn(what, "no api_key in the config and no OPENAI_API_KEY in the environment")
                continue
            request = f"asked for {' and '.join(details)}" if details else "text only"
            findings.ok(what, f"{llm.model_name} at {where}, {request}; it was not asked for an answer")
            continue
        if not isinstance(llm, LocalLlmConfig):
            findings.ok(what, f"_type: {llm.type_name}")
            continue
        with findings.catch_errors(what):
            require_local_extra()
            from etude.preflight.local_model import check_local_model

            trained_blocks = [block for block in blocks if block.enabled and block.target_model == name]
            adapters = [config.trainer_adapters.get(block.trainer_adapter or "") for block in trained_blocks]
            adapter = next((each for each in adapters if isinstance(each, LocalAdapterConfig)), None)
            with tempfile.TemporaryDirectory() as scratch:
                base = llm.model
                if llm.tiny is not None:
                    await make_base(llm.tiny, name, builder, base := Path(scratch) / "tiny")
                await asyncio.to_thread(check_local_model, what, llm, str(base), adapter, findings)


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
        adapter: Any = builder.config.trainer_adapters.get(block.trainer_adapter or "")
        if isinstance(adapter, LocalAdapterConfig):  # Building it would load the model.
            check_local(adapter, builder)
            capabilities = LOCAL_CAPABILITIES
        else:
            capabilities = (await builder.get_trainer_adapter(str(block.trainer_adapter))).capabilities()
        kind, made = adapter.type_name, trajectories.trajectory_builder_config
        check_run(
            f"'{kind}'", capabilities, trajectories, block, builder.config.llms, str(block.target_model)
        )
        # Give it a copy, so that it cannot change the loaded config.
        await trajectories.initialize(block.model_copy(deep=True))
        if isinstance(made, Collecting):
            engines = {name: await builder.get_llm(name) for name in builder.config.llms}
            assert isinstance(builder.run, RunFolder)
            evaluation: Any = None  # A check plays no episodes.
            runtime = Runtime(builder.run, builder, evaluation, examples, engines, str(block.target_model))
            await made.check_run(runtime)
        await trajectories.cleanup()
        findings.ok(what, f"{made.type_name} data ({trajectories.method}), trained by {kind}")


_PACKAGE = Path(__file__).parents[1]

EXTRAS = {
    "local": ("torch", "models that run and train in this process"),
    "data": ("pyarrow", "Parquet and Hugging Face datasets"),
    "plots": ("matplotlib", "pictures of a run's rewards"),
}
"""A package of each extra, and its use."""


def examine(folder: Path) -> Findings:
    """Examine Python, extras, device, memory and the disk of `folder`."""
    findings = Findings()
    findings.ok("etude", f"{importlib.metadata.version('etude')} in {_PACKAGE}")
    findings.ok("python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    for extra, (package, use) in EXTRAS.items():
        if find_spec(package) is None:
            findings.warn(f"extra '{extra}'", f"not installed; for {use}: {install_command(extra)}")
        else:
            findings.ok(f"extra '{extra}'", f"installed: {use}")
    if find_spec("torch") is not None:
        try:
            import torch

            device = choose_device()
            name = f" ({torch.cuda.get_device_name()})" if device.type == "cuda" else ""
            findings.ok("torch", f"{torch.__version__}, device {device.type}{name}, {usable_cores()} cores")
        except (ImportError, OSError) as error:
            findings.fail("torch", f"is installed and cannot be imported: {error}; install it again")
    free = available_memory()
    if free is not None and free < 1e9:  # Loading torch and a tiny model takes some 0.5 GB.
        findings.warn(
            "memory", f"only {shown_bytes(free)} free; end other programs, or take a larger machine"
        )
    elif free is not None:
        findings.ok("memory", f"{shown_bytes(free)} free")
    with findings.catch_errors("disk"):
        room = shutil.disk_usage(_require_writable(folder)).free
        if room < 2e9:
            advice = "free some, or name another folder with --output-dir"
            findings.warn("disk", f"only {shown_bytes(room)} free in {folder.absolute()}; {advice}")
        else:
            findings.ok("disk", f"{shown_bytes(room)} free in {folder.absolute()}")
    return findings


def _require_writable(folder: Path) -> Path:
    """Return the folder, or the nearest parent that exists. Raises StoreError if it takes no files."""
    folder = folder.absolute()
    existing = next(each for each in (folder, *folder.parents) if os.access(each, os.F_OK))
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise StoreError(
            f"no file can be written in {existing} ({error.strerror}); set another output_dir"
        ) from error
    return existing


async def examine_services(config: Config, findings: Findings) -> None:
    """Ask each model behind an address for a short answer, and check backends and the storage."""
    for name, llm in config.llms.items():
        if isinstance(llm, OpenAiLlmConfig):
            await _try_model(f"model {name}", llm, findings)
    with temporary_run("doctor") as run:
        async with Builder(config, run) as builder:
            for name, settings in config.trainer_adapters.items() if config.finetuning.enabled else ():
                if not isinstance(settings, LocalAdapterConfig):
                    await _try_backend(name, builder, findings)
    if config.storage is not None:
        with findings.catch_errors("storage"):
            findings.ok("storage", await probe(config.storage))


async def _try_backend(name: str, builder: Builder, findings: Findings) -> None:
    """Ask a backend whether it can train now."""
    what = f"backend {name}"
    with findings.catch_errors(what), user_code(EtudeError, "it could not be asked"):
        adapter = await builder.get_trainer_adapter(name)
        if await adapter.is_healthy():
            findings.ok(what, "answers, and can train now")
        else:
            why = adapter.unhealthy_because or "look at its address and `api_key`"
            findings.fail(what, f"does not answer, or refuses its key: {why}")


async def _try_model(what: str, llm: OpenAiLlmConfig, findings: Findings) -> None:
    """Ask for one short answer, without retries."""
    seconds = min(30.0, llm.request_timeout)
    engine = OpenAiEngine(llm.model_copy(update={"max_retries": 0, "request_timeout": seconds}))
    # Some endpoints refuse fewer tokens.
    request = ChatRequest(({"role": "user", "content": "Say yes."},), sampling=Sampling(max_tokens=16))
    begun = time.perf_counter()
    try:
        completion = await engine.complete(request)
    except EtudeError as error:
        findings.fail(what, f"{error}. Look at its `base_url`, `model_name` and `api_key`")
    else:
        took, usage = 1000 * (time.perf_counter() - begun), completion.usage
        tokens = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"
        findings.ok(what, f"{llm.model_name} answered a call in {took:.0f} ms ({tokens})")
    finally:
        await engine.close()
