"""Writing the files of a new project."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.config.component import ComponentConfig, WorkflowConfig
from etude.config.document import dump
from etude.config.nearest import alternatives
from etude.config.registry import lookup, names
from etude.config.supplies import Starter
from etude.core.errors import RequestError
from etude.core.keys import generator
from etude.models.source import PACKAGED
from etude.store.files import write_new_files

MODEL = PACKAGED
"""Small enough for a laptop, and trained to chat."""

_FILES = Path(__file__).parent / "starter_files"


def write_starter(folder: Path, task: str, model: str = MODEL) -> list[Path]:
    """Write a task's files, train.jsonl, validation.jsonl and config.yml into `folder`; what was written.

    Raises RequestError when one of them is there already, StoreError when they cannot be written.
    """
    rows = import_module(f"etude.preflight.starter_files.{task}.rows").rows
    train, held_out = rows(generator(0, "starter"))
    files = {file.stem: file.read_text(encoding="utf-8") for file in sorted((_FILES / task).glob("*.txt"))}
    config = files.pop("config.yml").replace("{model}", json.dumps(model))
    examples = {"train.jsonl": _lines(train), "validation.jsonl": _lines(held_out)}
    return write_new_files(folder, {**files, **examples, "config.yml": config})


def write_environment(folder: Path, environment: str, model: str = MODEL) -> list[Path]:
    """Write config.yml, and what goes with it, for an environment `TYPE` or `TYPE:TASK`; what was written.

    Raises RequestError for an unknown one, and as `write_starter` does.
    """
    name, _, task = environment.partition(":")
    starters = {each: lookup("workflow", each).config_type for each in names("workflow")}
    kinds = {each: kind for each, kind in starters.items() if _starter(kind, None) is not None}
    if name not in kinds:
        raise RequestError(f"there is no environment '{name}'" + alternatives(name, kinds))
    starter = _starter(kinds[name], task or None)
    assert starter is not None
    config = {
        "llms": {each: {"_type": "local", "model": model, "max_tokens": 64} for each in starter.models},
        "eval": {"general": {"max_concurrency": 32}},
        "trajectory_builders": {"grpo": {"_type": "grpo", "num_generations": 8, "examples_per_epoch": 8}},
        "trainer_adapters": {"local": {"_type": "local", "learning_rate": 2.0e-4, "lora": {"r": 16}}},
        "finetuning": {"enabled": True, "num_epochs": 10}
        | ({"targets": {each: {} for each in starter.models}} if len(starter.models) > 1 else {}),
    }
    for key, block in starter.blocks.items():
        config[key] = _laid_over(config.get(key), block)
    order = ("llms", "workflow", "eval", "trajectory_builders", "trainer_adapters", "finetuning")
    written = dump({key: config[key] for key in order})
    contents = {**starter.files, "config.yml": f"# Try it first: etude check config.yml\n\n{written}"}
    return write_new_files(folder, contents)


def _starter(kind: type[ComponentConfig], task: str | None) -> Starter | None:
    return kind.starter(task) if issubclass(kind, WorkflowConfig) else None


def _laid_over(below: Any, block: Any) -> Any:
    """`block`, with what mappings under it have beside."""
    if not isinstance(below, Mapping) or not isinstance(block, Mapping):
        return block
    return {**below, **{key: _laid_over(below.get(key), value) for key, value in block.items()}}


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    numbered = [{"id": f"q{number}", **row} for number, row in enumerate(rows)]
    return "".join(json.dumps(row) + "\n" for row in numbered)
