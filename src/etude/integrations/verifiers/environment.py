"""An environment of verifiers', from the block of a config."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any

from etude.config.import_path import note_user_module, where_raised
from etude.core.errors import MissingExtraError, RequestError
from etude.integrations.verifiers import CHAT

Block = str | Mapping[str, Any]
"""The id of a taskset, or the block `[env]` of a config of verifiers'."""


def require_verifiers() -> None:
    """Raise MissingExtraError when verifiers is not installed."""
    if importlib.util.find_spec("verifiers") is None:
        raise MissingExtraError("an environment of verifiers", "verifiers")


def taskset_id(block: Block) -> str:
    """The id of the tasks; empty where the block names none."""
    if isinstance(block, str):
        return block
    taskset = block.get("taskset")
    named = taskset.get("id") if isinstance(taskset, Mapping) else taskset
    return str(named or "")


def read_block(block: Block) -> Any:
    """The block as verifiers' `EnvConfig`, narrowed to the environment's own.

    Raises MissingExtraError without verifiers, and RequestError when the package of the environment is not
    installed or a key of the block is wrong.
    """
    require_verifiers()
    import verifiers.v1 as vf
    from pydantic import ValidationError

    from etude.integrations.verifiers.chat import install

    install()

    ident = taskset_id(block)
    if not ident:
        raise RequestError("workflow.environment: name its tasks: `environment: {taskset: {id: …}}`")
    note_user_module(ident.rpartition("/")[2].partition("@")[0].replace("-", "_"))
    raw = {"taskset": {"id": block}} if isinstance(block, str) else _copy(block)
    try:
        return vf.resolve_env_config(raw)
    except ModuleNotFoundError as error:
        raise RequestError(
            f"workflow.environment: {error}. Install its package, or put `{ident}.py` beside the config"
        ) from error
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, each['loc'])) or ident}: {each['msg']}" for each in error.errors()
        )
        raise RequestError(f"workflow.environment: {problems}") from error
    except Exception as error:
        raise RequestError(
            f"workflow.environment: '{ident}' cannot be read: {where_raised(error)}"
        ) from error


def _copy(block: Any) -> Any:
    """Dicts and lists of their own: verifiers writes into what it validates."""
    if isinstance(block, Mapping):
        return {key: _copy(value) for key, value in block.items()}
    return [_copy(value) for value in block] if isinstance(block, list) else block


def agents_of(config: Any) -> dict[str, Any]:
    """The configs of the roles, by their names."""
    from verifiers.v1.configs.agent import agent_config_fields

    return dict(agent_config_fields(config))


def completed(config: Any, models: Mapping[str, str], *, in_process: bool) -> Any:
    """The config with the models of its roles, and chat loops that run in this process where there are any.

    Such a role needs no sandbox: where it names no runtime, that is this machine.
    """
    import verifiers.v1 as vf

    from etude.integrations.verifiers.chat import ChatHarnessConfig

    changes: dict[str, Any] = {}
    for name, spec in agents_of(config).items():
        update: dict[str, Any] = {"model": models.get(name, spec.model)}
        harness = spec.harness or vf.default_agent_harness(config.taskset.id)
        is_stock = harness.id == "null" or (spec.harness is None and harness.id == "bash")
        if in_process and is_stock:
            kept = {"tool_timeout": harness.tool_timeout, "disabled_tools": harness.disabled_tools}
            harness = ChatHarnessConfig(**kept)
        if harness.id == CHAT and "runtime" not in spec.model_fields_set:
            update["runtime"] = vf.SubprocessConfig()
        changes[name] = spec.model_copy(update={**update, "harness": harness})
    return config.model_copy(update=changes)


def open_environment(block: Block, models: Mapping[str, str], *, in_process: bool = True) -> Any:
    """The environment. Raises as `read_block` does, and RequestError when it cannot be made."""
    import verifiers.v1 as vf

    config = completed(read_block(block), models, in_process=in_process)
    try:
        return vf.load_environment(config)
    except Exception as error:
        where = where_raised(error)
        raise RequestError(f"workflow.environment: '{config.env_id}' cannot be made: {where}") from error


def score_names(config: Any) -> list[str]:
    """The rewards and metrics that every episode of an environment with one agent is given.

    Those that are functions of its tasks: what an environment records itself shows only when it is played.
    A function that gives several numbers is not among them.
    """
    import verifiers.v1 as vf
    from verifiers.v1.utils.decorators import discover_decorated
    from verifiers.v1.utils.loaders import environment_class

    if environment_class(config.taskset.id, config.id) is not vf.SingleAgentEnv:
        return []
    # The functions are found by the class of an object; making a task takes data, which is not loaded yet.
    task = object.__new__(vf.task_type(config.taskset.id))
    functions = [fn for kind in ("reward", "metric") for fn in discover_decorated(task, kind)]
    names = [fn.__name__ for fn in functions if not _gives_several(fn)]
    plugged = config.taskset.task
    names += [*plugged.rewards, *plugged.metrics, *(judge.name or judge.id for judge in plugged.judges)]
    return list(dict.fromkeys(names))


def _gives_several(function: Any) -> bool:
    returned = str(getattr(function, "__annotations__", {}).get("return", ""))
    return "dict" in returned.lower() or "mapping" in returned.lower()
