"""The config that the arguments and keyword settings of `etude.train` and `etude.evaluate` stand for.

It only names components that a program gives as Python objects, and holds the objects while the program runs.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from etude.config.builder import Builder
from etude.config.component import DatasetConfig, EvaluatorConfig, LlmConfig, ToolsConfig, WorkflowConfig
from etude.config.document import KeyPath, Override, read_override
from etude.config.finetuning import FinetuneConfig, FinetuneRunConfig
from etude.config.import_path import user_code, where_defined
from etude.config.load import load_config, parse_config
from etude.config.registry import (
    DATASET,
    OTHER_DATASETS,
    VALIDATION,
    Factory,
    register_dataset,
    register_evaluator,
    register_tools,
    register_workflow,
)
from etude.config.schema import Config, EvalGeneralConfig
from etude.core.data_model import name_type
from etude.core.episode import Example
from etude.core.errors import ConfigError, DatasetError, RequestError, alternatives
from etude.loop.trainer import EpochTrainerConfig
from etude.protocols.protocol import Protocol
from etude.protocols.workflow import ProtocolWorkflow
from etude.rollout.datasets import RowsConfig
from etude.rollout.evaluator import FunctionEvaluator, as_evaluator
from etude.rollout.tools import FunctionTools
from etude.rollout.workflow import Workflow, as_workflow

_SECTIONS = {"algorithm": "trajectory_builders", "backend": "trainer_adapters", "trainer": "trainers"}
"""Arguments, and the sections of a config for the components made from them."""
_MISSING = {
    "llms": "model=, a name on the Hugging Face hub or a folder",
    "eval.general.dataset": "examples=, a list of dicts or a file",
    "reward": "reward=, a function of an example and an output that returns a number",
}
"""The config keys that a run needs, and the arguments that set them."""

_TRAINER = ("trainers",)
_BLOCKS: dict[tuple[str, ...], Any] = {
    _TRAINER: EpochTrainerConfig,
    ("finetuning", "run_configuration"): FinetuneRunConfig,
    ("eval", "general"): EvalGeneralConfig,
    ("finetuning",): FinetuneConfig,
}
"""The blocks of a config whose keys can be given as keywords. Of equal keys, the last one is meant."""
_SHORT = {"epochs": "num_epochs", "curriculum": "curriculum_learning"}
_OF_EVALUATIONS = {
    *("output_dir", "seed", "deterministic", "error_budget", "target_model", "targets", "reward_function"),
    *("run_configuration", "dataset", "validation_dataset"),
    *EvalGeneralConfig.model_fields,
}
"""The settings that matter to an evaluation."""


def is_config(agent: Any) -> bool:
    """Return whether `agent` is a whole config: a file, a Config, or a dict with more than a workflow."""
    if isinstance(agent, str | Path):
        return Path(agent).suffix in (".yml", ".yaml")
    return isinstance(agent, Config) or (isinstance(agent, dict) and "_type" not in agent)


def load(source: Any, overrides: Iterable[str | Override]) -> Config:
    """Return the config of a file, a dict or a Config."""
    changes = list(overrides)
    if isinstance(source, Config):
        if changes:
            raise RequestError("a Config is complete; give a file or a dict to have settings changed")
        return source
    return parse_config(source, changes) if isinstance(source, dict) else load_config(source, changes)


def for_evaluation(overrides: Iterable[str | Override], *, has_examples: bool = False) -> list[Override]:
    """Return overrides for an evaluation. Examples that are given or overridden replace the held-out ones."""
    changes = [*map(read_override, overrides)]

    def names(key: KeyPath) -> bool:
        return any(change.path[: len(key)] == key for change in changes)

    has_examples |= names(DATASET) or names(OTHER_DATASETS[0])
    if has_examples and not names(VALIDATION):
        changes.append(Override(VALIDATION, None, "examples"))
    return changes


def settings_as_overrides(settings: Mapping[str, Any], trainer: Callable[[], str | None]) -> list[Override]:
    """Return the settings as changed keys of a config. Raises RequestError for an unknown setting.

    `trainer` returns the name of the config's trainer. It is only called for a trainer's settings.
    """
    known = {"budget": (), **{key: path for path, block in _BLOCKS.items() for key in block.model_fields}}
    changes = []
    for short, value in settings.items():
        key = _SHORT.get(short, short)
        if key not in known:
            close = alternatives(short, [*known, *_SHORT])
            options = "Options of backend, algorithm and model are given there: backend={'_type': 'local', …}"
            raise RequestError(f"there is no setting '{short}'{close}. {options}")
        place = ("trainers", trainer() or "epochs") if known[key] == _TRAINER else known[key]
        changes.append(Override((*place, key), value, short))
    return changes


def refuse_training(settings: Mapping[str, Any]) -> None:
    """Raise RequestError for a setting that only training has."""
    known = {key for block in _BLOCKS.values() for key in block.model_fields} | _SHORT.keys()
    for name in settings:
        if name in known - _OF_EVALUATIONS:
            raise RequestError(f"{name}: an evaluation does not train; leave it out, or use etude.train")


def refuse(parts: Mapping[str, Any]) -> None:
    """Raise RequestError if a part is given together with a whole config."""
    for name, value in parts.items():
        if value is not None:
            raise RequestError(f"{name}: a whole config has its own; change it there, or by `overrides`")


def build_config(
    agent: Any,
    parts: Mapping[str, Any],
    overrides: Iterable[str | Override],
    settings: Mapping[str, Any],
    *,
    enabled: bool,
) -> Config:
    """Return the config of an agent with its parts, or the whole config given instead of an agent."""
    if is_config(agent):
        refuse(parts)
        changes = settings_as_overrides(settings, lambda: load(agent, overrides).finetuning.trainer)
        return load(agent, [*overrides, *changes])
    if isinstance(agent, Protocol):
        if parts["scenario"] is None:
            raise RequestError("a protocol is played on a task: give its scenario")
        several = parts["models"] if len(parts["models"] or ()) > 1 else None
        policies = several and {name: name for name in agent.agents if name in several}
        agent = ProtocolWorkflow(agent, parts["scenario"], policies)
    keys = [*_keys_of_parts(agent, parts)]
    trainer = next((key.value for key in keys if key.path == ("finetuning", "trainer")), None)
    # A section with a given component has no other.
    data: dict[str, Any] = {str(key.path[0]): {} for key in keys if key.path[0] in _SECTIONS.values()}
    data["finetuning"] = {"enabled": enabled}
    keys += settings_as_overrides(settings, lambda: trainer)
    try:
        return parse_config(data, [*keys, *overrides])
    except ConfigError as error:
        if missing := [text for key, text in _MISSING.items() if f"key '{key}' is missing" in str(error)]:
            raise RequestError(f"there is nothing to train with: give {'; and '.join(missing)}") from error
        raise


def _keys_of_parts(agent: Any, parts: Mapping[str, Any]) -> Iterator[Override]:
    """Yield the keys of a config that arguments stand for."""
    yield Override(("workflow",), workflow_config(agent), "agent")
    if isinstance(_plain_function(agent), ProtocolWorkflow):
        yield Override(("finetuning", "target_functions"), ["*"], "agent")
    if parts["model"] is not None:
        yield Override(("llms", "policy"), _model(parts["model"]), "model")
    for name, model in (parts["models"] or {}).items():
        yield Override(("llms", name), _model(model), f"models.{name}")
    evaluators = {} if parts["reward"] is None else evaluator_configs(parts["reward"])
    yield Override(("eval", "evaluators"), evaluators, "reward")
    if parts.get("tools") is not None:
        yield Override(("tools",), tools_configs(parts["tools"]), "tools")
    for argument, path in (("examples", DATASET), ("validation", VALIDATION)):
        if parts.get(argument) is not None:
            yield Override(path, dataset_config(parts[argument]), argument)
    known: dict[KeyPath, Any] = {}
    yield from _keys_of_components(parts, ("finetuning",), "", known)
    if evaluators:
        yield Override(("finetuning", "reward_function"), {"name": next(iter(evaluators))}, "reward")
    targets = parts.get("targets")
    named = targets if isinstance(targets, Mapping) else {}
    for name in [targets] if isinstance(targets, str) else targets or ():
        target, place = dict(named.get(name, {})), ("finetuning", "targets", name)
        short = {key: target.pop(key, None) for key in ("algorithm", "backend", "reward")}
        yield Override(place, target, f"targets.{name}")
        yield from _keys_of_components(short, place, f"targets.{name}.", known)
        if (reward := short["reward"]) is not None:
            yield Override((*place, "reward_function"), {"name": reward}, f"targets.{name}.reward")


def _keys_of_components(
    parts: Mapping[str, Any], place: KeyPath, prefix: str, known: dict[KeyPath, Any]
) -> Iterator[Override]:
    """Yield the keys of an algorithm, a backend and a trainer, and those at `place` that name them."""
    for argument, section in _SECTIONS.items():
        if (component := parts.get(argument)) is None:
            continue
        if isinstance(component, str):
            component = {"_type": component}
        keys = component if isinstance(component, dict) else {"_type": getattr(component, "type_name", None)}
        if (kind := keys.get("_type")) is None or isinstance(component, type):
            text = f"{prefix}{argument} is a name, a config or a dict with `_type`, found {component!r:.80}"
            raise RequestError(text)
        name = str(kind).replace(":", ".").rpartition(".")[2] or argument
        while known.get((section, name), component) is not component:
            name += "_"
        if (section, name) not in known:
            known[section, name] = component
            yield Override((section, name), component, f"{prefix}{argument}")
        yield Override((*place, section.removesuffix("s")), name, f"{prefix}{argument}")


def _model(model: Any) -> LlmConfig | dict[str, Any]:
    if not isinstance(model, str | Path | dict | LlmConfig):
        raise RequestError(
            f"a model is a name, a folder, or an entry of `llms`, found {model!r:.80}; a trained one can be "
            "trained on when it is exported: run.model.export(folder)"
        )
    if isinstance(model, LlmConfig):
        return model
    return {"_type": "local", **(model if isinstance(model, dict) else {"model": str(model)})}


class Live(BaseModel):
    """The config of a component that a program gave as a Python object."""

    name: str
    """The name of the function, or a word for several functions or for rows."""
    value: Any = Field(default=None, exclude=True, repr=False)


class LiveWorkflowConfig(Live, WorkflowConfig, name="live"):
    """An agent that a program gave as a Python object."""


class LiveEvaluatorConfig(Live, EvaluatorConfig, name="live"):
    """An evaluator that a program gave as a Python object."""


class LiveToolsConfig(Live, ToolsConfig, name="live"):
    """Python functions that a program gave as tools."""


class LiveRowsConfig(Live, RowsConfig, name="live"):
    """Rows that a program gave as a Python object."""

    source_key = "name"
    id_advice = "leave `id` out of all rows"

    def _contents(self) -> Iterable[Any]:
        rows: Iterable[Any] = self.value
        return rows


def _factory(argument: str, make: Callable[[Any], object]) -> Factory:
    """Return the factory of a component that a program gave as this argument."""

    async def build(config: Any, builder: Builder) -> AsyncIterator[Any]:
        if config.value is None:
            raise RequestError(
                f"'{config.name}' stands for a Python object, its {argument}, of the program that wrote this "
                "config. Run that program, or write the `module:name` of a function in its place"
            )
        yield make(config)

    return build


def require_objects(config: Config, run: Path) -> None:
    """Raise RequestError if a stored run needs a Python object that is not given again."""
    for argument, components in {
        "agent": [config.workflow],
        "reward": config.eval.evaluators.values(),
        "tools": config.tools.values(),
        "examples": [config.eval.general.dataset],
        "validation": [config.finetuning.run_configuration.validation_dataset],
    }.items():
        for each in components:
            if isinstance(each, Live) and each.value is None:
                raise RequestError(
                    f"the run was started by a program with its own {argument}, '{each.name}', which is not "
                    f"in the config; give it again, in Python: etude.resume({str(run)!r}, {argument}=…)"
                )


register_workflow(config_type=LiveWorkflowConfig)(_factory("agent", lambda live: as_workflow(live.value)))
register_evaluator(config_type=LiveEvaluatorConfig)(_factory("reward", lambda live: as_evaluator(live.value)))
register_tools(config_type=LiveToolsConfig)(_factory("tools", lambda live: FunctionTools(live.value)))
register_dataset(config_type=LiveRowsConfig)(_factory("examples", lambda live: live))


def workflow_config(agent: Any) -> WorkflowConfig | dict[str, Any] | str:
    """Return the workflow of a config for an agent: a function, a workflow, or an entry of a config.

    A function that another process can import is named by its path. The same holds for evaluators.
    """
    if isinstance(agent, str | dict | WorkflowConfig):
        return agent
    if (path := _import_path(agent)) is not None:
        return path
    workflow = as_workflow(agent)
    return LiveWorkflowConfig(name=workflow.name, value=workflow)


def evaluator_configs(reward: Any) -> dict[str, Any]:
    """Return the evaluators of a config: a mapping has their names, and others are named after themselves."""
    if isinstance(reward, Mapping) and "_type" not in reward:
        return {str(name): _evaluator_config(value) for name, value in reward.items()}
    rewards, made = reward if isinstance(reward, list | tuple) else [reward], {}
    for each in rewards:
        if isinstance(each, str):
            name = each.rpartition(":")[2].replace(".", "_")
        elif isinstance(each, Mapping | EvaluatorConfig):
            name = str(each["_type"] if isinstance(each, Mapping) else each.type_name)
        else:
            name = _live_evaluator(each).name
        made[name] = _evaluator_config(each)
    if len(made) < len(rewards):
        raise RequestError("two rewards have the same name; name them: reward={'right': …, 'short': …}")
    return made


def _evaluator_config(reward: Any) -> Any:
    if isinstance(reward, str | Mapping | EvaluatorConfig):
        return dict(reward) if isinstance(reward, Mapping) else reward
    return _import_path(reward) or _live_evaluator(reward)


def _live_evaluator(reward: Any) -> LiveEvaluatorConfig:
    evaluator = as_evaluator(reward)
    name = evaluator.name if isinstance(evaluator, FunctionEvaluator) else type(evaluator).__name__
    return LiveEvaluatorConfig(name=name if name.isidentifier() else "reward", value=evaluator)


def tools_configs(tools: Any) -> dict[str, Any]:
    """Return the tool sets of a config: a mapping has their names, and functions become the set `tools`."""
    sets = tools if isinstance(tools, Mapping) and "_type" not in tools else {"tools": tools}
    tool_sets: dict[str, Any] = {}
    for name, each in sets.items():
        if isinstance(each, Mapping | ToolsConfig):
            tool_sets[str(name)] = dict(each) if isinstance(each, Mapping) else each
            continue
        if not (callable(each) or isinstance(each, Iterable)):
            raise RequestError(f"tools are Python functions, or entries of `tools`, found {each!r:.80}")
        functions = [each] if callable(each) else list(each)
        paths = [_import_path(function) for function in functions]
        live = LiveToolsConfig(name=f"{len(functions)} functions", value=functions)
        tool_sets[str(name)] = {"_type": "functions", "functions": paths} if all(paths) else live
    return tool_sets


def dataset_config(examples: Any) -> DatasetConfig | dict[str, Any] | str:
    """Return the dataset of a config for examples: rows, an iterable of rows, a table, or a file."""
    if isinstance(examples, Mapping) and "_type" not in examples:
        keys = ", ".join([*map(str, examples)][:8])
        raise RequestError(
            f"examples are a list of rows or a file, found {name_type(examples)} of {keys}. Put a single row "
            "into a list, [row]; of several splits give one, splits['train']; a config has a `_type`"
        )
    if isinstance(examples, str | Path | dict | DatasetConfig):
        return str(examples) if isinstance(examples, Path) else examples
    if callable(getattr(examples, "to_dict", None)) and hasattr(examples, "columns"):
        # A data frame of polars or pandas.
        if len({*examples.columns}) < len(examples.columns):
            raise RequestError(
                f"examples: two columns have the same name: {', '.join(map(str, examples.columns))}"
            )
        examples = examples.to_dicts() if hasattr(examples, "to_dicts") else examples.to_dict("records")
    if not isinstance(examples, Iterable):
        raise RequestError(f"examples are a list of dicts or Examples, or a file; found {examples!r:.80}")
    with user_code(DatasetError, "the examples cannot be read"):
        rows = list(examples)
    if not rows:
        raise RequestError("the examples are an empty list or table; give at least one")
    are_examples = all(isinstance(row, Example) for row in rows)
    have_ids = are_examples or any(isinstance(row, Mapping) and "id" in row for row in rows)
    name = "1 row" if len(rows) == 1 else f"{len(rows)} rows"
    return LiveRowsConfig(name=name, value=rows, id_key="id" if have_ids else None)


def with_python_objects(
    config: Config,
    *,
    agent: Any = None,
    reward: Any = None,
    examples: Any = None,
    validation: Any = None,
    tools: Any = None,
) -> Config:
    """Return the config of a stored run, with the Python objects that it was started with.

    Raises RequestError for an object that the run did not get from a program.
    """
    evaluators, settings = config.eval.evaluators, config.finetuning.run_configuration
    rewards = reward if isinstance(reward, list | tuple) else [reward]
    named = reward if isinstance(reward, Mapping) else dict(zip(evaluators, rewards, strict=False))
    if len(named) < len(rewards) and reward is not None:
        raise RequestError(f"reward: the run has {len(evaluators)} evaluators, and {len(rewards)} are given")
    for argument, stored, value, make in [
        ("agent", config.workflow, agent, workflow_config),
        *(("reward", evaluators.get(name), each, _evaluator_config) for name, each in named.items()),
        ("examples", config.eval.general.dataset, examples, dataset_config),
        ("validation", settings.validation_dataset, validation, dataset_config),
    ]:
        if value is not None:
            _restore_object(argument, stored, value, make(value))
    for name, given in ({} if tools is None else tools_configs(tools)).items():
        own = tools[name] if isinstance(tools, Mapping) and name in tools else tools
        own = [own] if callable(own) else own
        _restore_object("tools", config.tools.get(name), own, given)
    return config


def _restore_object(argument: str, stored: Any, value: Any, given: Any) -> None:
    """Put a value into its stored component, unless that names the same function or file as `given`."""
    if isinstance(stored, Live) and not isinstance(value, str | Path):
        stored.value = given.value if isinstance(given, Live) else value
        return
    path, known = _named_path(given), _named_path(stored)
    if path is None or str(known) not in (str(path), str(Path(str(path)).absolute())):
        raise RequestError(
            f"{argument}: the run has a different one in its config, and continues with that; leave it out"
        )


def _named_path(component: Any) -> Any:
    """Return the functions or the file that a component names; None if it names none."""
    keys = {"function": component} if isinstance(component, str) else dict(component or ())
    return next((keys[key] for key in ("functions", "function", "file_path") if keys.get(key)), None)


def _import_path(value: Any) -> str | None:
    """Return `module:name` if another process can import the value from the top of a module, else None."""
    code = _plain_function(value)
    module, name = getattr(code, "__module__", None), getattr(code, "__qualname__", "")
    if module in (None, "__main__") or not name.isidentifier():
        return None
    public = getattr(sys.modules.get(str(module)), name, None)
    return f"{module}:{name}" if public is value or _is_same_again(public, value) else None


def _is_same_again(public: Any, value: Any) -> bool:
    """Return whether both come from the same lines, as after a module was imported again.

    Wrappers have the place of what they wrap, and closures share theirs, so none of these is known by it.
    """
    if type(public) is not type(value):
        return False
    functions = [_plain_function(each) for each in (public, value)]
    if any(hasattr(each, "__wrapped__") or getattr(each, "__closure__", None) for each in functions):
        return False
    if isinstance(value, Workflow) and replace(value, fn=public.fn) != public:
        return False
    first, second = map(where_defined, functions)
    return first == second


def _plain_function(value: Any) -> Any:
    return value.fn if isinstance(value, Workflow) else value
