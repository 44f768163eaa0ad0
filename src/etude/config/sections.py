"""Where components stand in a config, and which there are when the file names none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from etude.config.document import KeyPath, copied, dig
from etude.config.finetuning import SHIPPED
from etude.config.registry import Kind

NAMED: dict[Kind, KeyPath] = {
    "llms": ("llms",),
    "evaluators": ("eval", "evaluators"),
    "trajectory_builders": ("trajectory_builders",),
    "trainer_adapters": ("trainer_adapters",),
    "trainers": ("trainers",),
}
"""Sections that hold components by name."""

DATASET: KeyPath = ("eval", "general", "dataset")
OTHER_DATASETS: tuple[KeyPath, ...] = (
    ("finetuning", "run_configuration", "dataset"),
    ("finetuning", "run_configuration", "validation_dataset"),
)

SINGLE: dict[KeyPath, Kind] = {
    ("workflow",): "workflow",
    **dict.fromkeys((DATASET, *OTHER_DATASETS), "datasets"),
}
"""Keys that hold one component."""

SECTION_OF: dict[str, Kind] = {
    "trainer": "trainers",
    "trajectory_builder": "trajectory_builders",
    "trainer_adapter": "trainer_adapters",
}
"""The sections that keys of `finetuning` name an entry of."""

_DEFAULTS = {SECTION_OF[key]: {name: {"_type": name}} for key, name in SHIPPED.items()}


def with_defaults(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with the components that need not be written."""
    return dict(copied(_DEFAULTS | data))


def components_in(data: dict[str, Any]) -> Iterator[tuple[KeyPath, Kind]]:
    """The path and kind of each component in a config, in the order of `Kind`'s sections."""
    for path, kind in SINGLE.items():
        if dig(data, path) is not None:
            yield path, kind
    for kind, section in NAMED.items():
        entries = dig(data, section)
        for name in list(entries) if isinstance(entries, dict) else ():
            yield (*section, name), kind


def replace_at(data: Any, path: KeyPath, value: Any) -> None:
    """Put `value` at a path that exists."""
    dig(data, path[:-1])[path[-1]] = value
