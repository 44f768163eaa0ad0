"""The things that an environment cannot run without, besides models: programs, sandboxes, keys."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

from etude.config.supplies import Need, package_need
from etude.core.errors import MissingExtraError, RequestError
from etude.integrations.verifiers import CHAT
from etude.integrations.verifiers.environment import Block, agents_of, completed, read_block

HOSTED = {
    "prime": ("PRIME_API_KEY", "a Prime sandbox"),
    "modal": ("MODAL_TOKEN_ID", "a Modal sandbox"),
    "e2b": ("E2B_API_KEY", "an E2B sandbox"),
}
"""Runtimes on somebody's machines: the variable that holds their key, and what they are."""

ENGINES = {"docker": "docker", "podman": "podman", "apptainer": "apptainer"}
"""Runtimes on this machine, and the program that runs them."""

SHIPPED = {
    "textarena": ("textarena", "ta"),
    "openenv": ("openenv", "openenv"),
    "harbor": ("harbor", "harbor"),
}
"""Tasksets of verifiers' that need a package: its import name, and the extra of verifiers that brings it."""

_SECONDS = 10


def needs_of(block: Block, *, in_process: bool = True) -> list[Need]:
    """All that is needed, each with whether it is there. Nothing is started, and no task is loaded."""
    package = package_need("verifiers", "verifiers")
    if not package.is_met:
        return [package]
    try:
        config = completed(read_block(block), {}, in_process=in_process)
    except (RequestError, MissingExtraError) as error:
        return [package, Need("the environment", False, str(error))]
    needs = [package, *_of_taskset(config.taskset), *_of_runtimes(config), *_of_keys(config)]
    return list({need.what: need for need in needs}.values())


def _of_taskset(taskset: Any) -> Iterator[Need]:
    ident = taskset.id.replace("-", "_").lower()
    if ident in SHIPPED:
        module, extra = SHIPPED[ident]
        is_there = importlib.util.find_spec(module) is not None
        yield Need(f"the package {module}", is_there, f"pip install 'verifiers[{extra}]>=0.4,<0.5'")
    if ident == "textarena" and is_there:
        remedy = "python -m nltk.downloader words averaged_perceptron_tagger_eng"
        yield Need("the words of nltk, or a network for them", _has_words(), remedy)


def _has_words() -> bool:
    from nltk import data

    try:
        data.find("corpora/words")
    except LookupError:
        return False
    return True


def _of_runtimes(config: Any) -> Iterator[Need]:
    for role, spec in agents_of(config).items():
        kind = spec.runtime.type
        if kind in HOSTED:
            variable, what = HOSTED[kind]
            remedy = f"set {variable}, or run it here: `{role}: {{runtime: {{type: docker}}}}`"
            yield Need(f"a network and {what} for the agent '{role}'", bool(os.environ.get(variable)), remedy)
        elif kind in ENGINES:
            remedy = f"install and start {ENGINES[kind]}, or choose another `{role}: {{runtime: …}}`"
            yield Need(f"{ENGINES[kind]} for the agent '{role}'", _runs(ENGINES[kind]), remedy)
        elif spec.harness.id != CHAT:
            remedy = f"pip install uv, or `{role}: {{harness: {{id: {CHAT}}}}}`, which starts no process"
            yield Need(
                f"uv and a network for the harness '{spec.harness.id}' of '{role}'",
                shutil.which("uv") is not None,
                remedy,
            )


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


def _runs(program: str) -> bool:
    """Whether a container engine is installed and answers."""
    if shutil.which(program) is None:
        return False
    command = [program, "version" if program == "apptainer" else "info"]
    try:
        return subprocess.run(command, capture_output=True, timeout=_SECONDS, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
