"""The parts that a workflow brings along, so that an environment is one line of a config."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from etude.core.errors import install_command

Written: TypeAlias = Mapping[str, Any]
"""A component as a config file has it: `{"_type": "seeds", "size": 64}`."""


@dataclass(frozen=True, slots=True)
class Supplies:
    """Parts of a config that follow from its workflow. Each stands in only where the config names none."""

    dataset: Written | None = None
    """In place of `eval.general.dataset`."""
    validation: Written | None = None
    """In place of `finetuning.run_configuration.validation_dataset`."""
    evaluators: Mapping[str, Written] = field(default_factory=dict)
    """In place of `eval.evaluators`, all of them together."""
    reward: str | None = None
    """The one of them that is the reward where the config says nothing; needed where there are several."""
    reward_of_model: Mapping[str, str] = field(default_factory=dict)
    """The same for models that have a reward of their own, by their names in `llms`."""


@dataclass(frozen=True, slots=True)
class Need:
    """Something outside of Etude that a workflow cannot run without: a package, Docker, a network."""

    what: str
    """`the package gymnasium`."""
    is_met: bool
    remedy: str = ""
    """The next thing to type where it is not there."""


def package_need(module: str, extra: str) -> Need:
    """The need of an installed package, by its import name, which an extra of Etude's brings."""
    is_there = importlib.util.find_spec(module) is not None
    return Need(f"the package {module}", is_there, install_command(extra))


@dataclass(frozen=True, slots=True)
class Starter:
    """A project that `etude init --env` writes: blocks of its config, and files beside it."""

    blocks: Mapping[str, Any]
    """Laid over the blocks of every such project; at least `workflow`."""
    files: Mapping[str, str] = field(default_factory=dict)
    models: tuple[str, ...] = ("policy",)
    """The entries of `llms`, of which each is trained."""
