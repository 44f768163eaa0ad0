"""The config that the arguments of `etude.train` and `etude.evaluate` stand for.

It only names the components that a program hands over as Python objects, and holds them while that runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.config.component import DatasetConfig, EvaluatorConfig, LlmConfig, ToolsConfig, WorkflowConfig
from etude.config.document import Override, dotted
from etude.config.finetuning import FinetuneConfig, FinetuneRunConfig
from etude.config.import_path import where_defined
from etude.config.load import load_config, parse_config
from etude.config.nearest import alternatives
from etude.config.registry import register_dataset, register_evaluator, register_tools, register_workflow
from etude.config.schema import Config, EvalGeneralConfig
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.interfaces import Evaluator
from etude.core.tools import ToolSource
from etude.loop.trainer import EpochTrainerConfig
from etude.protocols.protocol import Protocol
from etude.protocols.workflow import ProtocolWorkflow
from etude.rewards.evaluator import FunctionEvaluator, as_evaluator
from etude.rollout.datasets import RowsConfig
from etude.rollout.tool_functions import FunctionTools
from etude.rollout.workflow import Workflow, as_workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder

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

_VALUE: Any = Field(default=None, exclude=True, repr=False)


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
    if isinstance(_code_of(agent), ProtocolWorkflow):
        finetuning["target_functions"] = ["*"]
    if parts.get("tools") is not None:
        data["tools"] = tools_configs(parts["tools"])
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
    } | {"budget": (), "prices": ()}
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


class LiveWorkflowConfig(WorkflowConfig, name="live"):
    """An agent that a program gave as a Python object."""

    name: str
    """The name of the function."""
    value: Any = _VALUE


class LiveEvaluatorConfig(EvaluatorConfig, name="live"):
    """An evaluator that a program gave as a Python object."""

    name: str
    """The name of the function."""
    value: Any = _VALUE


class LiveToolsConfig(ToolsConfig, name="live"):
    """Python functions that a program gave as tools."""

    name: str
    """A word for them."""
    value: Any = _VALUE


class LiveRowsConfig(RowsConfig, name="live"):
    """Rows that a program gave as a Python object."""

    source_key = "name"

    name: str
    """A word for them."""
    value: Any = _VALUE

    def _contents(self) -> Iterable[Any]:
        rows: Iterable[Any] = self.value
        return rows


@register_workflow(config_type=LiveWorkflowConfig)
async def live_workflow(config: LiveWorkflowConfig, builder: Builder) -> AsyncIterator[Workflow]:
    """Raises RequestError where the program that has the function is not running."""
    yield as_workflow(_given(config, "agent", builder))


@register_evaluator(config_type=LiveEvaluatorConfig)
async def live_evaluator(config: LiveEvaluatorConfig, builder: Builder) -> AsyncIterator[Evaluator]:
    """Raises RequestError where the program that has the function is not running."""
    yield as_evaluator(_given(config, "reward", builder))


@register_tools(config_type=LiveToolsConfig)
async def live_tools(config: LiveToolsConfig, builder: Builder) -> AsyncIterator[ToolSource]:
    """Raises RequestError where the program that has the functions is not running."""
    yield FunctionTools(_given(config, "tools", builder))


@register_dataset(config_type=LiveRowsConfig)
async def live_rows(config: LiveRowsConfig, builder: Builder) -> AsyncIterator[LiveRowsConfig]:
    """Raises RequestError where the program that has the rows is not running."""
    _given(config, "examples", builder)
    yield config


def _given(config: Any, argument: str, builder: Builder) -> Any:
    if config.value is None:
        run = "run" if builder.run is None else repr(str(builder.run.path))
        raise RequestError(
            f"the run was started by a program with its own {argument}, '{config.name}', which is not in the "
            f"config; give it again, in Python: etude.resume({run}, {argument}=…)"
        )
    return config.value


def workflow_config(agent: Any) -> WorkflowConfig | dict[str, Any] | str:
    """The workflow of a config that an agent is: a function, a workflow, or what a config may say.

    A function that another process can import is named by its path; so are evaluators.
    """
    if isinstance(agent, str | dict | WorkflowConfig):
        return agent
    return _import_path(agent) or _live_workflow(agent)


def _live_workflow(agent: Any) -> LiveWorkflowConfig:
    workflow = as_workflow(agent)
    return LiveWorkflowConfig(name=workflow.name, value=workflow)


def evaluator_configs(reward: Any) -> dict[str, Any]:
    """The evaluators of a config: those of a mapping by their names, or one by the name that it has."""
    if isinstance(reward, Mapping) and "_type" not in reward:
        return {str(name): _evaluator_config(value)[1] for name, value in reward.items()}
    if isinstance(reward, list | tuple):
        return dict(_evaluator_config(value) for value in reward)
    return dict([_evaluator_config(reward)])


def _evaluator_config(reward: Any) -> tuple[str, Any]:
    if isinstance(reward, str):
        return reward.rpartition(":")[2].replace(".", "_"), reward
    if isinstance(reward, Mapping | EvaluatorConfig):
        name = reward["_type"] if isinstance(reward, Mapping) else reward.type_name
        return str(name), dict(reward) if isinstance(reward, Mapping) else reward
    live = _live_evaluator(reward)
    return live.name, _import_path(reward) or live


def _live_evaluator(reward: Any) -> LiveEvaluatorConfig:
    evaluator = as_evaluator(reward() if isinstance(reward, type) else reward)
    name = evaluator.name if isinstance(evaluator, FunctionEvaluator) else type(evaluator).__name__
    return LiveEvaluatorConfig(name=name if name.isidentifier() else "reward", value=evaluator)


def tools_configs(tools: Any) -> dict[str, Any]:
    """The tool sets of a config: those of a mapping by their names, or functions as the set `tools`."""
    sets = tools if isinstance(tools, Mapping) and "_type" not in tools else {"tools": tools}
    return {str(name): _tools_config(each) for name, each in sets.items()}


def _tools_config(tools: Any) -> ToolsConfig | dict[str, Any]:
    if isinstance(tools, Mapping | ToolsConfig):
        return dict(tools) if isinstance(tools, Mapping) else tools
    functions = [tools] if callable(tools) else list(tools)
    paths = [_import_path(function) for function in functions]
    if all(paths):
        return {"_type": "functions", "functions": paths}
    return LiveToolsConfig(name=f"{len(functions)} functions", value=functions)


def dataset_config(examples: Any) -> DatasetConfig | dict[str, Any] | str:
    """The dataset of a config that examples are: rows, an iterable of them, a table, or a file."""
    if isinstance(examples, str | dict | DatasetConfig):
        return examples
    if isinstance(examples, Path):
        return str(examples)
    if callable(getattr(examples, "to_dict", None)) and hasattr(examples, "columns"):
        examples = examples.to_dict("records")  # A data frame of pandas.
    if not isinstance(examples, Iterable):
        raise RequestError(f"examples are a list of dicts or Examples, or a file; found {examples!r:.80}")
    rows = list(examples)
    have_ids = all(isinstance(row, Example) or (isinstance(row, Mapping) and "id" in row) for row in rows)
    return LiveRowsConfig(name=f"{len(rows)} rows", value=rows, ids="column" if have_ids else "from_row")


def with_live(
    config: Config,
    *,
    agent: Any = None,
    reward: Any = None,
    examples: Any = None,
    validation: Any = None,
    tools: Any = None,
) -> Config:
    """The config of a stored run, with the objects that it was begun with.

    Raises RequestError for one that the run does not have from a program.
    """
    general, settings = config.eval.general, config.finetuning.run_configuration
    workflow, evaluators = config.workflow, dict(config.eval.evaluators)
    if agent is not None:
        workflow = _again("agent", workflow, agent, _live_workflow)
    if reward is not None:
        live = [name for name, each in evaluators.items() if isinstance(each, LiveEvaluatorConfig)]
        named = reward if isinstance(reward, Mapping) else dict.fromkeys(live or evaluators, reward)
        for name, value in named.items():
            evaluators[name] = _again("reward", evaluators.get(name), value, _live_evaluator)
    if examples is not None:
        dataset = _again("examples", general.dataset, examples, dataset_config)
        general = general.model_copy(update={"dataset": dataset})
    if validation is not None:
        held_out = _again("validation", settings.validation_dataset, validation, dataset_config)
        settings.validation_dataset = held_out
    sets = dict(config.tools)
    for name, value in ({} if tools is None else tools_configs(tools)).items():
        if not isinstance(value, dict) or value.get("functions") != getattr(sets.get(name), "functions", 0):
            sets[name] = _again("tools", sets.get(name), value, lambda live: live)
    block = config.eval.model_copy(update={"general": general, "evaluators": evaluators})
    return config.model_copy(update={"eval": block, "workflow": workflow, "tools": sets})


def _again(argument: str, stored: Any, value: Any, live: Callable[[Any], Any]) -> Any:
    """The component that is given again, or the stored one where that is the same function or file."""
    if isinstance(stored, LiveWorkflowConfig | LiveEvaluatorConfig | LiveRowsConfig | LiveToolsConfig):
        return live(value)
    path = value if isinstance(value, str | Path) else _import_path(value)
    known = getattr(stored, "function", None) or getattr(stored, "file_path", None)
    if path is not None and known is not None and str(known) in (str(path), str(Path(path).absolute())):
        return stored
    raise RequestError(
        f"{argument}: the run has another one in its config, and goes on as it was begun; leave it out"
    )


def _import_path(value: Any) -> str | None:
    """`module:name` of what is defined at the top of a module that another process can import."""
    code = _code_of(value)
    module, name = getattr(code, "__module__", None), getattr(code, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    public = getattr(sys.modules.get(str(module)), name, None)
    # By place, because a module that was imported again has other objects.
    is_public = type(public) is type(value) and where_defined(_code_of(public)) == where_defined(code)
    return f"{module}:{name}" if is_public else None


def _code_of(value: Any) -> Any:
    return value.fn if isinstance(value, Workflow) else value
