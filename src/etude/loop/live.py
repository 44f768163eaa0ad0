"""Components that a program hands over as Python objects, which its config only names."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from etude.config.component import DatasetConfig, EvaluatorConfig, WorkflowConfig
from etude.config.import_path import where_defined
from etude.config.registry import register_dataset, register_evaluator, register_workflow
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.core.example import Example
from etude.core.interfaces import Evaluator
from etude.protocols.workflow import ProtocolWorkflow
from etude.rewards.evaluator import FunctionEvaluator, as_evaluator
from etude.rollout.datasets import RowsConfig
from etude.rollout.workflow import Workflow, as_workflow

if TYPE_CHECKING:
    from etude.config.builder import Builder

_VALUE: Any = Field(default=None, exclude=True, repr=False)


class LiveWorkflowConfig(WorkflowConfig, name="live"):
    """An agent that a program gave as a Python object."""

    name: str = Field(description="The name of the function.")
    value: Any = _VALUE


class LiveEvaluatorConfig(EvaluatorConfig, name="live"):
    """An evaluator that a program gave as a Python object."""

    name: str = Field(description="The name of the function.")
    value: Any = _VALUE


class LiveRowsConfig(RowsConfig, name="live"):
    """Rows that a program gave as a Python object."""

    source_key = "name"

    name: str = Field(description="A word for them.")
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


def is_protocol(agent: Any) -> bool:
    """Whether all calls of the agent are trained on by default, as in a protocol."""
    return isinstance(agent.fn if isinstance(agent, Workflow) else agent, ProtocolWorkflow)


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
    config: Config, *, agent: Any = None, reward: Any = None, examples: Any = None, validation: Any = None
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
    block = config.eval.model_copy(update={"general": general, "evaluators": evaluators})
    return config.model_copy(update={"eval": block, "workflow": workflow})


def _again(argument: str, stored: Any, value: Any, live: Callable[[Any], Any]) -> Any:
    """The component that is given again, or the stored one where that is the same function or file."""
    if isinstance(stored, LiveWorkflowConfig | LiveEvaluatorConfig | LiveRowsConfig):
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
