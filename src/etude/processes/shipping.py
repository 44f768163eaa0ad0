"""Sends a config and its examples to other processes, and builds the config's agent."""

import contextlib
import json
import os
import socket
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import SecretStr

from etude.config.builder import Builder
from etude.config.document import (
    KeyPath,
    copy_containers,
    join_path,
    portable_references,
    replace_at,
    required_variables,
    strings,
    value_at,
)
from etude.config.finetuning import FinetuneConfig
from etude.config.key_types import KeyType, walk
from etude.config.load import components_in, find_secrets, parse_config
from etude.config.registry import KINDS
from etude.config.schema import Config
from etude.core.call import Sampling
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.core.interfaces import Engine, Evaluator
from etude.engines.local import OpponentsConfig
from etude.rollout.collector import Collector, Limits, Runner
from etude.rollout.evaluator import Scorer
from etude.rollout.workflow import Workflow
from etude.store.journal import Steps

NOT_SENT = "not sent"
"""Replaces values that runners on other machines do not use."""

_SECTIONS = (("llms",), ("workflow",), ("tools",), ("eval", "evaluators"))
"""The config sections whose components runners build."""


def config_to_json(
    config: Config, *, over_network: bool = False, at_head: Collection[str] = ()
) -> dict[str, Any]:
    """Return the config as JSON, from which `config_from_json` makes an equal one.

    On this machine all values are sent, secrets included. The receiver was started for the run, and nobody
    else reads the connection. Over a network no secret is sent. A value from the environment is then sent as
    its reference, which runners resolve in their own environment. Runners do not build the models `at_head`.

    Raises RequestError for a workflow, evaluator or tool that only this program has. Raises it also for a
    secret written out in the config that would have to be sent.
    """
    config = config.model_copy(update={"report": []})
    data = config.model_dump(mode="json", fallback=str)
    components = dict(components_in(data))
    for path, _, value in walk(config, KeyType(Config)):
        if isinstance(value, SecretStr):
            replace_at(data, path, value.get_secret_value())
        elif path in components:
            replace_at(data, path, {"_type": value.type_name, **value_at(data, path)})
            fields = type(value).model_fields.items()
            if not any(field.exclude and getattr(value, name) is not None for name, field in fields):
                continue
            # It holds objects that a config file cannot name, such as a function of a program.
            if components[path] != "datasets":
                name = getattr(value, "name", path[-1])
                raise RequestError(
                    f"the {KINDS[components[path]].noun} '{name}' is an object of this program, which other "
                    "processes cannot import; define it at the top of a module that they can import, or "
                    "leave out eval.general.isolation"
                )
            # A stand-in that any config may have. Runners are sent the examples themselves.
            replace_at(data, path, {"_type": "seeds"})
    for path, text in [*strings(data)]:
        replace_at(data, path, text.replace("$", "$$"))  # It is not a reference to the environment.
    if over_network:
        _remove_secrets(config, data, at_head)
    for path, text in config._as_written.items():
        if "$" not in text and value_at(data, path) is not None:
            replace_at(data, path, text)  # The import path of a type, which registers it there.
    return data


def config_from_json(data: dict[str, Any]) -> Config:
    """Read what `config_to_json` made. Raises RequestError for variables, ConfigError for components."""
    missing = [
        f"{name} (for {join_path(path)})"
        for path, text in strings(data)
        for name in required_variables(text)
        if name not in os.environ
    ]
    if missing:
        raise RequestError(
            f"on node {socket.gethostname()} the environment of runners lacks {', '.join(missing)}: set it "
            "there before `ray start`, or in the pod's `env`. Secrets are not sent to nodes"
        )
    return parse_config(copy_containers(data))


def example_to_json(example: Example) -> dict[str, Any]:
    """Return the example as JSON. Raises RequestError if JSON would lose something."""
    data = {"id": example.id, "inputs": dict(example.inputs), "expected": example.expected}
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        # Types at every level show in the text.
        if repr(data) == repr(json.loads(json.dumps(data))):
            return data
    raise RequestError(
        f"example {example.id!r} holds a value that JSON lacks, such as a tuple or a date, and cannot be "
        "sent to another process; give text, numbers, lists and mappings, or leave out eval.general.isolation"
    )


def _remove_secrets(config: Config, data: dict[str, Any], at_head: Collection[str]) -> None:
    """Replace values from the environment by references, and clear values that runners do not use.

    Raises RequestError for written-out secrets that runners need.
    """
    for block in ("cluster", "storage"):
        data[block] = None
    references = {path: text for path, text in config._as_written.items() if "$" in text}
    for path, text in references.items():
        if isinstance(value_at(data, path), str):
            otherwise = None if _is_built_there(path, at_head) else NOT_SENT
            replace_at(data, path, portable_references(text, os.environ, otherwise))
    written_out = []
    for path in find_secrets(config, config.model_dump(mode="json", fallback=str), sure=True):
        if path in references or value_at(data, path) is None:
            continue
        if _is_built_there(path, at_head):
            written_out.append(join_path(path))
        else:
            replace_at(data, path, NOT_SENT)
    if written_out:
        raise RequestError(
            f"secrets are not sent to the nodes of a cluster, but {', '.join(written_out)} is written out in "
            "the config: put it into the environment of every node and write ${NAME} in its place, or leave "
            "it out if no key is needed"
        )


def _is_built_there(path: KeyPath, at_head: Collection[str]) -> bool:
    """Return whether a key belongs to a component that runners build."""
    is_component = any(path[: len(section)] == section for section in _SECTIONS)
    return is_component and not (path[0] == "llms" and path[1] in at_head)


async def build_collector(
    builder: Builder, models: Mapping[str, Engine], journal: Steps, runner: Runner | None = None
) -> Collector:
    """Build the collector of the config's workflow, which plays episodes in `runner` or in this process.

    Raises RequestError if it cannot be built. Nothing is sampled.
    """
    config = builder.config
    workflow: Workflow = await builder.get_workflow()
    general = config.eval.general
    # Each model's default sampling. Opponents sample as the model that they play.
    played = {
        name: config.llms[llm.of] if isinstance(llm, OpponentsConfig) else llm
        for name, llm in config.llms.items()
    }
    return Collector(
        workflow,
        models,
        journal,
        seed=config.finetuning.seed,
        limits=Limits(general.max_concurrency, general.timeout, general.max_calls),
        sampling={
            name: sampling
            for name, llm in played.items()
            if isinstance(sampling := getattr(llm, "sampling", None), Sampling)
        },
        template_options={name: getattr(llm, "chat_template_kwargs", {}) for name, llm in played.items()},
        # With several trained models, none is the default.
        default_model=None if config.finetuning.targets else target_model(config.finetuning, models),
        tools={name: await builder.get_tools(name) for name in config.tools},
        runner=runner,
    )


async def build_evaluators(builder: Builder) -> dict[str, Evaluator]:
    """Return the config's evaluators by name."""
    return {name: await builder.get_evaluator(name) for name in builder.config.eval.evaluators}


async def build_scorer(builder: Builder, journal: Steps) -> Scorer:
    """Build the scorer with the config's evaluators."""
    general = builder.config.eval.general
    evaluators, most = await build_evaluators(builder), general.max_concurrency
    return Scorer(evaluators, journal, timeout=general.timeout, max_concurrency=most)


def target_model(block: FinetuneConfig, models: Mapping[str, Any]) -> str:
    """Return the trained model, which is the default if an agent names none."""
    targets = block.targets.values()
    for name in (block.target_model, *(target.model for target in targets), *models):
        if name is not None:
            return name
    raise RequestError("the config has no models; add one: `llms: {policy: {_type: local, …}}`")
