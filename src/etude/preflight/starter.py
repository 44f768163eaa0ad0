"""Writing the files of a new project."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from etude.core.keys import generator
from etude.models.source import PACKAGED
from etude.store.files import write_new_files

MODEL = PACKAGED
"""Small enough for a laptop, and trained to chat."""


def write_starter(folder: Path, task: str, model: str = MODEL) -> list[Path]:
    """Write a task's files, train.jsonl, validation.jsonl and config.yml into `folder`; what was written.

    Raises RequestError when one of them is there already, StoreError when they cannot be written.
    """
    rows = import_module(f"etude.preflight.starter_files.{task}.rows").rows
    train, held_out = rows(generator(0, "starter"))
    folder_of_task = Path(__file__).parent / "starter_files" / task
    files = {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder_of_task.glob("*.txt"))}
    config = files.pop("config.yml").replace("{model}", json.dumps(model))
    examples = {"train.jsonl": _lines(train), "validation.jsonl": _lines(held_out)}
    return write_new_files(folder, {**files, **examples, "config.yml": config})


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    numbered = [{"id": f"q{number}", **row} for number, row in enumerate(rows)]
    return "".join(json.dumps(row) + "\n" for row in numbered)
