"""The config that the arguments of `etude.train` and `etude.evaluate` stand for."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from etude.config.component import LlmConfig
from etude.config.document import Override, dotted
from etude.config.finetuning import FinetuneConfig, FinetuneRunConfig
from etude.config.load import load_config, parse_config
from etude.config.nearest import alternatives
from etude.config.schema import Config, EvalGeneralConfig
from etude.core.errors import RequestError
from etude.loop.live import dataset_config, evaluator_configs, is_protocol, workflow_config
from etude.loop.trainer import EpochTrainerConfig
from etude.protocols.protocol import Protocol
from etude.protocols.workflow import ProtocolWorkflow

_BLOCKS: dict[tuple[str, ...], Any] = {
    ("finetuning",): FinetuneConfig,
    ("finetuning", "run_configuration"): FinetuneRunConfig,
    ("eval", "general"): EvalGeneralConfig,
    ("trainers", "epochs"): EpochTrainerConfig,
}
"""The blocks of a config whose keys may be given by keyword."""
_OWN_ARGUMENTS = {"enabled", "run_configuration", "config_file", "dataset", "validation_dataset", "reward"}
_OWN_ARGUMENTS |= {"trainer", "trajectory_builder", "trainer_adapter", "targets"}
_SHORT = {"epochs": "num_epochs", "curriculum": "curriculum_learning"}


def is_config(agent: Any) -> bool:
    """Whether it is a whole config: a file, a Config, or a dict with more than a workflow."""
    if isinstance(agent, str | Path):
        return Path(agent).suffix in (".yml", ".yaml")
    return isinstance(agent, Config) or (isinstance(agent, dict) and "_type" not in agent)


def load(source: Any, overrides: Iterable[Override]) -> Config:
    """The config of a file, a dict or a Config."""
    changes = list(overrides)
    if isinstance(source, Config):
        if changes:
            raise RequestError("a Config is complete; give a file or a dict to have settings changed")
        return source
    return parse_config(source, changes) if isinstance(source, dict) else load_config(source, changes)


def refuse(parts: Mapping[str, Any]) -> None:
    """Raise RequestError for a part that is given beside a whole config."""
    for name, value in parts.items():
        if value is not None:
            raise RequestError(f"{name}: a whole config has its own; change it there, or by `overrides`")


def config_of(
    agent: Any,
    parts: Mapping[str, Any],
    overrides: Iterable[str],
    settings: Mapping[str, Any],
    *,
    enabled: bool,
) -> Config:
    """The config of an agent with its parts, or the whole config that is in its place."""
    if is_config(agent):
        refuse(parts)
        return load(agent, [*overrides, *as_overrides(settings)])
    if isinstance(agent, Protocol):
        if parts["scenario"] is None:
            raise RequestError("a protocol is played on a task: give its scenario")
        agent = ProtocolWorkflow(agent, parts["scenario"])
    models = ({} if parts["model"] is None else {"policy": parts["model"]}) | dict(parts["models"] or {})
    evaluators = {} if parts["reward"] is None else evaluator_configs(parts["reward"])
    data: dict[str, Any] = {
        "workflow": workflow_config(agent),
        "llms": {name: _model(model) for name, model in models.items()},
        "eval": {"evaluators": evaluators},
        "finetuning": {"enabled": enabled},
    }
    finetuning: dict[str, Any] = data["finetuning"]
    if is_protocol(agent):
        finetuning["target_functions"] = ["*"]
    if parts["examples"] is not None:
        data["eval"]["general"] = {"dataset": dataset_config(parts["examples"])}
    if parts.get("validation") is not None:
        finetuning["run_configuration"] = {"validation_dataset": dataset_config(parts["validation"])}
    _add_components(data, finetuning, parts)
    targets = parts.get("targets")
    if targets is not None:
        named = targets if isinstance(targets, Mapping) else {name: {} for name in targets}
        finetuning["targets"] = {name: _target(data, target) for name, target in named.items()}
    elif evaluators:
        finetuning["reward_function"] = {"name": next(iter(evaluators))}
    for path, value in _by_path(settings):
        block = data
        for key in path[:-1]:
            block = block.setdefault(key, {"_type": "epochs"} if key == "epochs" else {})
        block[path[-1]] = value
    return parse_config(data, overrides)


def _model(model: Any) -> LlmConfig | dict[str, Any]:
    if not isinstance(model, str | Path | dict | LlmConfig):
        raise RequestError(
            f"a model is a name, a folder, or an entry of `llms`, found {model!r:.80}; a trained one can be "
            "trained on when it is exported: run.model.export(folder)"
        )
    if isinstance(model, LlmConfig):
        return model
    return {"_type": "local", **(model if isinstance(model, dict) else {"model": str(model)})}


def _add_components(data: dict[str, Any], block: dict[str, Any], parts: Mapping[str, Any]) -> None:
    """Put the algorithm, backend and trainer into their sections, and their names into the block."""
    for argument, key in (
        ("algorithm", "trajectory_builder"),
        ("backend", "trainer_adapter"),
        ("trainer", "trainer"),
    ):
        component = parts.get(argument)
        if component is None:
            continue
        if isinstance(component, str):
            component = {"_type": component}
        kind = component["_type"] if isinstance(component, dict) else component.type_name
        entries = data.setdefault(f"{key}s", {})
        name = str(kind).replace(":", ".").rpartition(".")[2] or argument
        while name in entries and entries[name] is not component:
            name += "_"
        entries[name] = component
        block[key] = name


def _target(data: dict[str, Any], target: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of `finetuning.targets`, with its components put into their sections."""
    short = ("algorithm", "backend", "reward")
    block = {key: value for key, value in target.items() if key not in short}
    _add_components(data, block, {key: target.get(key) for key in ("algorithm", "backend")})
    if "reward" in target:
        block["reward_function"] = {"name": target["reward"]}
    return block


def _by_path(settings: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """The settings with where they stand in a config. Raises RequestError for one that is not known."""
    known = {
        key: path
        for path, block in reversed(_BLOCKS.items())
        for key in block.model_fields
        if key not in _OWN_ARGUMENTS
    }
    placed = []
    for short, value in settings.items():
        key = _SHORT.get(short, short)
        if key not in known:
            raise RequestError(f"there is no setting '{short}'" + alternatives(short, [*known, *_SHORT]))
        if key == "reward_function" and isinstance(value, str):
            value = {"name": value}
        placed.append(((*known[key], key), value))
    return placed


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """The settings as overrides of a whole config. Raises RequestError for one that is not known."""
    return [
        f"{dotted(path)}={json.dumps(value, default=str, ensure_ascii=False)}"
        for path, value in _by_path(settings)
    ]
