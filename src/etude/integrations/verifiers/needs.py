"""The things that an environment cannot run without, besides models; and a project to begin with."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from etude.config.supplies import Need, Starter, package_need
from etude.core.errors import MissingExtraError, RequestError
from etude.integrations.verifiers import CHAT
from etude.integrations.verifiers.environment import Block, agents_of, completed, read_block

HOSTED = {"prime": "PRIME_API_KEY", "modal": "MODAL_TOKEN_ID", "e2b": "E2B_API_KEY"}
"""Runtimes on somebody's machines, and the variable that holds their key."""

ENGINES = ("docker", "podman", "apptainer")
"""Runtimes on this machine, called as the program that runs them."""

SHIPPED = {"textarena": "ta", "openenv": "openenv", "harbor": "harbor"}
"""Tasksets of verifiers' that need a package of their name, and the extra of verifiers that brings it."""


def needs_of(block: Block) -> list[Need]:
    """All that is needed, each with whether it is there. Nothing is started, and no task is loaded."""
    package = package_need("verifiers", "verifiers")
    if not package.is_met:
        return [package]
    try:
        config = completed(read_block(block), {})
    except (RequestError, MissingExtraError) as error:
        return [package, Need("the environment", False, str(error))]
    needs = [package, *_of_taskset(config.taskset), *_of_runtimes(config), *_of_keys(config)]
    return list({need.what: need for need in needs}.values())


def _of_taskset(taskset: Any) -> Iterator[Need]:
    ident = taskset.id.replace("-", "_").lower()
    if ident in SHIPPED:
        is_there = importlib.util.find_spec(ident) is not None
        yield Need(f"the package {ident}", is_there, f"pip install 'verifiers[{SHIPPED[ident]}]>=0.4,<0.5'")


def _of_runtimes(config: Any) -> Iterator[Need]:
    for role, spec in agents_of(config).items():
        kind = spec.runtime.type
        if (variable := HOSTED.get(kind)) is not None:
            remedy = f"set {variable}, or run it here: `{role}: {{runtime: {{type: docker}}}}`"
            is_there = bool(os.environ.get(variable))
            yield Need(f"a network and a {kind} sandbox for the agent '{role}'", is_there, remedy)
        elif kind in ENGINES:
            remedy = f"install and start {kind}, or choose another `{role}: {{runtime: …}}`"
            yield Need(f"{kind} for the agent '{role}'", shutil.which(kind) is not None, remedy)
        elif spec.harness.id != CHAT:
            remedy = f"pip install uv, or `{role}: {{harness: {{id: {CHAT}}}}}`, which starts no process"
            what = f"uv and a network for the harness '{spec.harness.id}' of '{role}'"
            yield Need(what, shutil.which("uv") is not None, remedy)


def _of_keys(config: Any) -> Iterator[Need]:
    """The variables from which agents with an endpoint of their own, and judges, take their keys."""
    endpoints = {
        f"the agent '{role}'": spec.client for role, spec in agents_of(config).items() if spec.client
    }
    task = config.taskset.task
    endpoints |= {f"the judge '{judge.name or judge.id}'": judge for judge in task.judges}
    for whose, client in endpoints.items():
        remedy = f"export {client.api_key_var}=…"
        what = f"a network and the key in {client.api_key_var} for {whose}"
        yield Need(what, bool(os.environ.get(client.api_key_var)), remedy)


_FILE = Path(__file__).parent / "starter_files" / "my_env.py.txt"


def starter_of(task: str | None) -> Starter:
    """An environment of one's own to change, or with `task` the config of a package that is installed."""
    workflow = {"_type": "verifiers", "environment": task or "my_env"}
    files = {} if task else {"my_env.py": _FILE.read_text(encoding="utf-8")}
    return Starter({"workflow": workflow}, files)
