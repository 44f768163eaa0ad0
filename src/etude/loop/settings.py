"""The keyword settings of `etude.train` and `etude.evaluate`, and their places in a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from etude.config.document import join_path
from etude.config.finetuning import FinetuneConfig, FinetuneRunConfig
from etude.config.key_types import field_names
from etude.config.registry import Kind, lookup, names
from etude.config.schema import EvalGeneralConfig
from etude.core.errors import RequestError, alternatives
from etude.loop.trainer import EpochTrainerConfig

_BLOCKS: dict[tuple[str, ...], Any] = {
    ("finetuning",): FinetuneConfig,
    ("finetuning", "run_configuration"): FinetuneRunConfig,
    ("eval", "general"): EvalGeneralConfig,
    ("trainers", "epochs"): EpochTrainerConfig,
}
"""The blocks of a config whose keys can be given as keywords."""
_OWN_ARGUMENTS = {"enabled", "run_configuration", "config_file", "dataset", "validation_dataset", "reward"}
_OWN_ARGUMENTS |= {"trainer", "trajectory_builder", "trainer_adapter", "targets"}
_SHORT = {"epochs": "num_epochs", "curriculum": "curriculum_learning"}

_RENAMED = {"dataset": "examples", "validation_dataset": "validation", "evaluator": "reward"}
_RENAMED |= {"trajectory_builder": "algorithm", "trainer_adapter": "backend", "workflow": "agent"}
_COMPONENTS: dict[str, Kind] = {
    "backend": "trainer_adapters",
    "algorithm": "trajectory_builders",
    "model": "llms",
}
"""Arguments that have their own settings."""
_USUAL = ("local", "grpo")
"""The types to suggest if several have a setting."""


def by_path(settings: Mapping[str, Any]) -> list[tuple[tuple[str, ...], Any]]:
    """Return the settings with their paths in a config. Raises RequestError for an unknown setting."""
    known = {
        key: path
        for path, block in reversed(_BLOCKS.items())
        for key in block.model_fields
        if key not in _OWN_ARGUMENTS
    } | {"budget": ()}
    placed = []
    for short, value in settings.items():
        key = _SHORT.get(short, short)
        if key not in known:
            where = _name_setting(short) or alternatives(short, [*known, *_SHORT])
            raise RequestError(f"there is no setting '{short}'{where}")
        if key == "reward_function" and isinstance(value, str):
            value = {"name": value}
        placed.append(((*known[key], key), value))
    return placed


def _name_setting(name: str) -> str:
    """Return the end of a sentence that names the argument with a setting. Empty if there is none."""
    if (argument := _RENAMED.get(name)) is not None:
        return f"; it is given as {argument}="
    types = [(argument, kind, each) for argument, kind in _COMPONENTS.items() for each in names(kind)]
    for argument, kind, each in sorted(types, key=lambda found: found[2] not in _USUAL):
        with suppress(RequestError):  # The type may not be available.
            if name in field_names(lookup(kind, each).config_type):
                first = '"model": "…"' if argument == "model" else f'"_type": "{each}"'
                return f'; it is one of {argument}=: {argument}={{{first}, "{name}": …}}'
    return ""


def as_overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings as overrides of a whole config. Raises RequestError for an unknown setting."""
    return [
        f"{join_path(path)}={json.dumps(value, default=str, ensure_ascii=False)}"
        for path, value in by_path(settings)
    ]
