"""The Etude run behind `nat finetune`: its config and its run folder."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from etude.config.document import parse_value
from etude.config.load import parse_config, resolved_yaml
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.core.keys import content_hash
from etude.integrations.nat.components import (
    NatDatasetConfig,
    NatEvaluatorConfig,
    NatWorkflowConfig,
    only_model,
)
from etude.loop.lifecycle import note_changes, without_changeable
from etude.store.facts import list_runs, read_facts
from etude.store.run_folder import RunFolder
from etude.store.stored_config import stored_data
from etude.verbs import new_run

logger = logging.getLogger("etude.integrations.nat")

Json = dict[str, Any]

_SAMPLING = ("temperature", "top_p", "max_tokens")
_ENDPOINT = ("base_url", "api_key", "request_timeout", "max_retries", "logprobs", "top_logprobs")
"""Keys of `llms` that have the same meaning in the toolkit and in Etude."""

_TRAINING_BLOCKS = {"trainers", "trainer_adapters", "trajectory_builders", "finetuning", "general"}
"""Blocks of the toolkit's config that do not influence an episode."""

_OWN = ("seed", "deterministic", "error_budget", "fine_tune_from_scratch")
"""Keys of Etude's `finetuning` that the toolkit's lacks. They are options of `etude_trainer`."""


def trained_model(llms: Mapping[str, Any], wanted: str | None) -> str:
    """Return the entry to train, by its name or its model's name. The default is the only entry.

    Raises RequestError if no single entry matches.
    """
    if wanted is None or wanted in llms:
        return wanted or only_model(llms)
    named = [name for name, llm in llms.items() if getattr(llm, "model_name", None) == wanted]
    if len(named) != 1:
        raise RequestError(
            f"finetuning.target_model: there is no model '{wanted}' in `llms`; there are: "
            f"{', '.join(llms) or 'none'}"
        )
    return named[0]


def translate(toolkit_config: Any, run_config: Any) -> Config:
    """Build the config of the Etude run that the toolkit's config describes.

    `run_config` is its `finetuning`, with the command's options in `run_configuration`. Raises RequestError
    for an unsupported option, ConfigError for an invalid block.
    """
    options = run_config.run_configuration
    if options.endpoint is not None:
        raise RequestError(
            "--endpoint: calls that an agent makes in another process cannot be told apart by episode; leave "
            "it out, and the workflow runs here"
        )
    if options.validation_config_file is not None:
        raise RequestError(
            "--validation_config_file: validation runs the same workflow and evaluators on other examples; "
            "name those with --validation_dataset"
        )
    builder = toolkit_config.trajectory_builders[run_config.trajectory_builder]
    adapter = toolkit_config.trainer_adapters[run_config.trainer_adapter]
    trainer = toolkit_config.trainers[run_config.trainer]
    target = trained_model(toolkit_config.llms, run_config.target_model)
    settings = toolkit_config.model_dump(mode="json", exclude=_TRAINING_BLOCKS, fallback=str)
    workflow = NatWorkflowConfig(
        model=target, result_json_path=options.result_json_path, digest=content_hash(settings)
    )
    workflow._toolkit_config = toolkit_config
    general = toolkit_config.eval.general
    given = {"max_concurrency": general.max_concurrency, "dataset": NatDatasetConfig()}
    limits = {"timeout": trainer.timeout, "max_calls": trainer.max_calls}
    given |= {key: value for key, value in limits.items() if value is not None}
    evaluators = toolkit_config.eval.evaluators
    return parse_config(
        {
            "llms": {target: model_block(target, toolkit_config.llms[target], adapter)},
            "workflow": workflow,
            "eval": {
                "general": given,
                "evaluators": {name: NatEvaluatorConfig(evaluator=name) for name in evaluators},
            },
            "trajectory_builders": {run_config.trajectory_builder: {"_type": "grpo"} | builder.builder},
            "trainer_adapters": {run_config.trainer_adapter: {"_type": "local"} | adapter.adapter},
            "trainers": {run_config.trainer: {"_type": "epochs"} | trainer.trainer},
            "finetuning": _finetuning(run_config, target, trainer),
        }
    )


def model_block(name: str, llm: Any, adapter: Any) -> Json:
    """Build the trained entry of `llms` from the toolkit's entry and the adapter's `model`."""
    # The field by its Python name, because a dump may use an alias.
    written, model = llm.model_dump(exclude_none=True), getattr(llm, "model_name", None) or name
    kind = adapter.adapter.get("_type", "local")
    is_here = kind == "local"
    block: Json = {"_type": "local", "model": model} if is_here else {"_type": "openai", "model_name": model}
    block |= {key: written[key] for key in _SAMPLING + (() if is_here else _ENDPOINT) if key in written}
    if kind == "lm_server":
        block["provider"] = "etude"
    return block | adapter.model


def _finetuning(run_config: Any, target: str, trainer: Any) -> Json:
    reward, options = run_config.reward_function, run_config.run_configuration
    files = {
        "dataset": options.dataset,
        "validation_dataset": options.validation_dataset or trainer.validation_dataset,
    }
    named = {
        key: NatDatasetConfig(file_path=Path(file).absolute())
        for key, file in files.items()
        if file is not None
    }
    own = {key: getattr(trainer, key) for key in _OWN}
    block = {
        "enabled": True,
        "trainer": run_config.trainer,
        "trajectory_builder": run_config.trajectory_builder,
        "trainer_adapter": run_config.trainer_adapter,
        "target_functions": list(run_config.target_functions),
        "target_model": target,
        "curriculum_learning": run_config.curriculum_learning.model_dump(),
        "num_epochs": run_config.num_epochs,
        "output_dir": str(Path(run_config.output_dir).absolute()),
        "run_configuration": {"validation_interval": options.validation_interval, **named},
        "reward_function": None if reward is None else {"name": reward.name},
    }
    return block | {key: value for key, value in own.items() if value is not None}


@asynccontextmanager
async def open_run(config: Config) -> AsyncIterator[RunFolder]:
    """Open the folder of the latest unfinished run of this config, or of a new run.

    Changeable keys, such as limits and the number of epochs, may differ. Raises StoreError.
    """
    unfinished = unfinished_run(config)
    with new_run(config) if unfinished is None else RunFolder.open(unfinished) as run:
        if unfinished is not None:
            await note_changes(run, config)
        yield run


def unfinished_run(config: Config) -> Path | None:
    """Return the latest run of this config that is neither finished nor in use."""
    wanted = without_changeable(parse_value(resolved_yaml(config)), config)
    for run in list_runs(config.finetuning.output_dir):
        is_its = without_changeable(stored_data(run, required=False), config) == wanted
        if is_its and read_facts(run).state == "unfinished":
            return run
    return None
