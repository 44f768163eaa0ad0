"""A verifiers environment: its config block, its tasks as examples, its scores and failures."""

from __future__ import annotations

import copy
import math
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from etude.config.import_path import note_user_module, user_code, where_raised
from etude.core.episode import Example
from etude.core.errors import (
    DatasetError,
    EnvironmentAway,
    EpisodeError,
    EtudeError,
    RequestError,
    require_extra,
)
from etude.integrations.verifiers import CHAT

Block = str | Mapping[str, Any]
"""The id of a taskset, or the block `[env]` of a verifiers config."""


def require_verifiers() -> None:
    """Raise MissingExtraError if verifiers is not installed."""
    require_extra("verifiers", "an environment of verifiers", "verifiers")


def read_block(block: Block) -> Any:
    """Parse the block into verifiers' `EnvConfig`, or the environment's subclass of it.

    Raises MissingExtraError without verifiers. Raises RequestError if the environment's package is not
    installed or a key of the block is wrong.
    """
    require_verifiers()
    import verifiers.v1 as vf

    from etude.integrations.verifiers.chat import install

    install()

    taskset = block if isinstance(block, str) else block.get("taskset")
    ident = str((taskset.get("id") if isinstance(taskset, Mapping) else taskset) or "")
    if not ident:
        raise RequestError("workflow.environment: name its tasks: `environment: {taskset: {id: …}}`")
    note_user_module(ident.rpartition("/")[2].partition("@")[0].replace("-", "_"))
    # Copy the block, because verifiers modifies its input during validation.
    raw = {"taskset": {"id": block}} if isinstance(block, str) else copy.deepcopy({**block})
    try:
        return vf.resolve_env_config(raw)
    except ModuleNotFoundError as error:
        raise RequestError(
            f"workflow.environment: {error}. Install its package, or put `{ident}.py` beside the config"
        ) from error
    except Exception as error:
        raise RequestError(
            f"workflow.environment: '{ident}' cannot be read: {where_raised(error)}"
        ) from error


def role_configs(config: Any) -> dict[str, Any]:
    """Return the config of each role, by the role's name."""
    from verifiers.v1.configs.agent import agent_config_fields

    return dict(agent_config_fields(config))


def open_environment(block: Block, models: Mapping[str, str]) -> Any:
    """Load the environment with the models of its roles, and with chat loops that run in this process.

    A role gets such a chat loop if it names no harness or verifiers' `null`. It needs no sandbox, so its
    default runtime is this machine. Raises as `read_block` does, and RequestError if loading fails.
    """
    import verifiers.v1 as vf

    config = read_block(block)
    from etude.integrations.verifiers.chat import ChatHarnessConfig

    changes: dict[str, Any] = {}
    for name, spec in role_configs(config).items():
        update: dict[str, Any] = {"model": models.get(name, spec.model)}
        harness = spec.harness or vf.default_agent_harness(config.taskset.id)
        is_stock = harness.id == "null" or (spec.harness is None and harness.id == "bash")
        if is_stock:
            kept = {"tool_timeout": harness.tool_timeout, "disabled_tools": harness.disabled_tools}
            harness = ChatHarnessConfig(**kept)
        if harness.id == CHAT and "runtime" not in spec.model_fields_set:
            update["runtime"] = vf.SubprocessConfig()
        changes[name] = spec.model_copy(update={**update, "harness": harness})
    config = config.model_copy(update=changes)
    with user_code(RequestError, f"workflow.environment: '{config.env_id}' cannot be made"):
        return vf.load_environment(config)


Split = Literal["train", "validation", "all"]

ENDLESS = 256
"""The default number of training tasks of an endless taskset."""

HELD_OUT = 64
"""The default number of held-out tasks, unless a quarter of the tasks is less."""

_ANSWER = "answer"


class Tasks:
    """The tasks of a taskset, by key."""

    def __init__(self, taskset: Any, by_key: dict[str, Any] | None = None) -> None:
        """Create the tasks. Tasksets can share the dictionary `by_key`, which collects the tasks."""
        self._taskset = taskset
        self._by_key: dict[str, Any] = {} if by_key is None else by_key

    def with_options(self, options: Mapping[str, Any]) -> Tasks:
        """Return the tasks of the same taskset with other options. Raises RequestError for wrong options."""
        import verifiers.v1 as vf

        config = self._taskset.config
        with user_code(RequestError, f"{self._name}: taskset"):
            changed = type(config).model_validate({**config.model_dump(), **options})
            return Tasks(vf.load_taskset(changed), self._by_key)

    def examples(self, split: Split, size: int | None, held_out: int | None) -> list[Example]:
        """Return the examples of a split. Training and validation never share a task.

        The tasks are shuffled, always alike. The first `held_out` are for validation and the next `size` for
        training; `all` keeps the original order. An endless taskset makes only the tasks that it needs.
        Raises DatasetError if tasks cannot be made, if none are left, or if two have the same key.
        """
        if not self._taskset.bounded:
            # The first tasks are held out, so that they do not depend on the `size` of the other split.
            first = 0 if split == "all" else _held_out(held_out, 4 * HELD_OUT)
            more = 0 if split == "validation" else size or ENDLESS
            chosen = self._read(islice(self._taskset, first + more))[first if more else 0 :]
            if split != "all":
                random.Random(0).shuffle(chosen)
            return [self._example(task) for task in chosen]
        tasks = self._read(self._taskset)
        if split == "all":
            return [self._example(task) for task in tasks[:size]]
        random.Random(0).shuffle(tasks)
        first = _held_out(held_out, len(tasks))
        if first >= len(tasks):
            raise DatasetError(
                f"{self._name}: {len(tasks)} tasks, of which {first} should be held out: none is left to "
                "train on; choose a smaller `held_out`"
            )
        chosen = tasks[:first] if split == "validation" else tasks[first:][:size]
        return [self._example(task) for task in chosen]

    def find(self, example: Example) -> Any:
        """Return the task with the example's id. If its inputs differ, make a task from the example instead.

        Raises DatasetError if the example's inputs do not make a task.
        """
        if (task := self._by_key.get(example.id)) is not None:
            known = self._example(task)
            # A custom dataset may have the same ids.
            is_same = all(known.inputs.get(name) == value for name, value in example.inputs.items())
            if is_same and example.expected in (None, known.expected):
                return task
        task_type = type(self._taskset).task_type()
        data_type = task_type.data_type()
        columns = dict(example.inputs)
        if example.expected is not None and _ANSWER in data_type.model_fields:
            columns.setdefault(_ANSWER, example.expected)
        try:
            return task_type(data_type.model_validate(columns), self._taskset.config.task)
        except ValueError as error:
            raise DatasetError(
                f"example {example.id!r} is not a task of {self._name}, and its columns make none: "
                f"{where_raised(error)}"
            ) from error

    def _read(self, source: Iterable[Any]) -> list[Any]:
        """Load all tasks of `source`, and store each by its key."""
        tasks: list[Any] = []
        places: dict[str, int] = {}
        with user_code(DatasetError, f"{self._name} cannot be loaded"):
            for number, task in enumerate(source):
                first = places.setdefault(task.key, number)
                if first != number:
                    raise DatasetError(
                        f"{self._name}: tasks {first} and {number} have the same key {task.key!r}; leave one "
                        "out, or have `Task.key` return what tells them apart"
                    )
                tasks.append(task)
        if not tasks:
            raise DatasetError(
                f"{self._name} has no tasks: its `load` yields none; is its data there, and the split right?"
            )
        self._by_key |= {task.key: task for task in tasks}
        return tasks

    @property
    def _name(self) -> str:
        return f"taskset '{self._taskset.config.id}'"

    def _example(self, task: Any) -> Example:
        inputs: Mapping[str, Any] = task.data.model_dump(mode="json", exclude_defaults=True)
        shown = {name: value for name, value in inputs.items() if name not in ("idx", _ANSWER)}
        return Example(task.key, shown, inputs.get(_ANSWER))


def _held_out(wanted: int | None, tasks: int) -> int:
    return min(HELD_OUT, tasks // 4) if wanted is None else wanted


REWARD = "reward"
"""The name of an environment's reward: the weighted sum of the rewards from its tasks and judges."""


@dataclass(frozen=True, slots=True)
class Score:
    """A score for `episode.score`."""

    name: str
    value: float
    agent: str | None
    runs: int
    """The number of runs that `value` is the mean of."""


def find_scores(traces: Sequence[Any]) -> list[Score]:
    """Return every reward and metric of the episode and, with several agents, of each agent.

    A score is the mean over an agent's runs, and over agents for the episode. The reward replaces a metric
    with the same name. Raises EpisodeError for a number that is not finite, and for a missing reward, which
    never counts as 0.
    """
    agents = list(dict.fromkeys(trace.agent.name for trace in traces))
    owners: list[str | None] = [None, *(agents if len(agents) > 1 else [])]
    values: dict[tuple[str | None, str], list[float]] = defaultdict(list)
    for trace in traces:
        agent = trace.agent.name
        if missing := [name for name, reward in trace.rewards.items() if reward is None]:
            raise EpisodeError(
                f"the environment has not given {', '.join(map(repr, missing))} of '{agent}': its "
                "scoring ran out of time. Raise `timeout: {scoring: …}` of that agent, or leave it out"
            )
        numbers = {name: value for name, value in trace.metrics.items() if value is not None}
        numbers |= {name: reward.score for name, reward in trace.rewards.items()}
        if trace.rewards:
            numbers[REWARD] = math.fsum(reward.value for reward in trace.rewards.values())
        for name, value in numbers.items():
            if not math.isfinite(value):
                raise EpisodeError(
                    f"the environment's '{name}' of '{agent}' is {value}; a reward or a metric "
                    "must be a finite number"
                )
            values[None, name].append(value)
            values[agent, name].append(value)
    return [
        Score(name, math.fsum(given) / len(given), owner, len(given))
        for owner in owners
        for (agent, name), given in values.items()
        if agent == owner
    ]


_AWAY = {"SandboxError", "TunnelError", "InterceptionError", "ToolsetError", "HarnessError"}
"""verifiers' errors that neither the agent nor the environment's code caused."""

_BY_CALLS = {"ProviderError", "HarnessError", "InterceptionError"}
"""verifiers' errors that a failed model call leads to."""

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)
_LIBRARY = ("/site-packages/", "/dist-packages/", "<frozen", "/lib/python3")
_OURS = str(Path(__file__).parents[2])


def episode_error(environment: str, task: str, played: Any, calls: Sequence[EtudeError]) -> EtudeError:
    """Return the error that ends an episode: its first failed agent run's, or the environment's.

    A failed call is its cause if the environment reports one. A call that failed and was repeated does not
    hide an error of the environment's own code. Failures of the environment's infrastructure are
    EnvironmentAway, so that they can be retried.
    """
    failed = next((trace for trace in played.traces if not trace.ok and trace.errors), None)
    if failed is None and not played.errors:
        return EpisodeError(f"'{environment}' did not finish the task {task!r}, and does not say why")
    first = played.errors[-1] if failed is None else failed.errors[-1]
    whose = "the environment" if failed is None else f"agent '{failed.agent.name}'"
    if calls and first.type in _BY_CALLS:
        error = EpisodeError(f"'{environment}', task {task!r}, {whose}: {calls[-1]}")
        error.__cause__ = calls[-1]
        return error
    # Find the innermost line outside of Etude and of libraries.
    own = [
        f"{frame['file']}:{frame['line']}: "
        for frame in _FRAME.finditer(first.traceback or "")
        if not frame["file"].startswith(_OURS) and not any(part in frame["file"] for part in _LIBRARY)
    ]
    place = own[-1] if own else ""
    message = f"{place}'{environment}', task {task!r}, {whose}: {first.type}: {first.message}"
    return EnvironmentAway(message) if first.type in _AWAY else EpisodeError(message)
