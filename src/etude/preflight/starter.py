"""The files of a new project."""

import json
from pathlib import Path

from etude.models.source import PACKAGED
from etude.store.files import write_new_files

FILES = Path(__file__).parent / "starter_files"
"""A folder for each task. Each file's name ends in `.txt`."""


def write_starter(folder: Path, task: str, model: str = PACKAGED) -> list[Path]:
    """Write a task's files, examples and config.yml into `folder`, and return their paths. Raises
    RequestError if one of them exists, and StoreError if they cannot be written."""
    files = {file.stem: file.read_text(encoding="utf-8") for file in sorted((FILES / task).glob("*.txt"))}
    config = files.pop("config.yml").replace("{model}", json.dumps(model))
    return write_new_files(folder, {**files, "config.yml": config})
