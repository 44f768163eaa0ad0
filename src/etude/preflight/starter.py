"""Projects to start from: those of `etude init`, and of `etude demo` with the model that it trains."""

from __future__ import annotations

import json
from pathlib import Path

from etude.config.import_path import import_object, make_importable
from etude.core.errors import RequestError
from etude.core.interfaces import Progress
from etude.engines.local import require_local_extra
from etude.models.source import PACKAGED, locate, packaged_folder
from etude.store.files import write_new_files

FILES = Path(__file__).parent / "starter_files"
"""A folder for each task. Each file's name ends in `.txt`."""

_PACKAGE = Path(__file__).parents[1]

TASKS = {
    "calculator": "learns to use a calculator: a question, a tool call, the result, the answer",
    "tictactoe": "learns tic-tac-toe against a random opponent; a random player who knows the rules gets 0.5",
    "sort": "learns to sort letters",
    "extraction": "learns to read notes about orders into the fields of a schema",
}
"""The demo's tasks of a tiny model, each as the end of a sentence. The example with its name has its code."""

PRETRAINED = "tickets"
"""The demo's task of a pretrained model: the project that `etude init --task` writes under this name."""


def write_starter(folder: Path, task: str, model: str = PACKAGED) -> list[Path]:
    """Write a task's files, examples and config.yml into `folder`, and return their paths.

    Raises RequestError if one of them exists already, and StoreError if they cannot be written.
    """
    files = {file.stem: file.read_text(encoding="utf-8") for file in sorted((FILES / task).glob("*.txt"))}
    config = files.pop("config.yml").replace("{model}", json.dumps(model))
    return write_new_files(folder, {**files, "config.yml": config})


def write_demo(task: str, folder: Path) -> None:
    """Write a demo's project into a folder (absolute; empty or new).

    Raises RequestError if this is impossible, or if the pretrained model is not available.
    """
    require_local_extra()
    if task == PRETRAINED:
        # If `make real-model` has made it, the hub is not asked.
        source = str(packaged_folder()) if packaged_folder().is_dir() else PACKAGED
        locate(source)
        write_starter(folder, PRETRAINED, source)
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} already exists and is not empty; name another folder with --out")
    shared = examples_folder() / "warm_up.py"  # It makes the tiny models of all examples.
    files = sorted(file for file in (*(examples_folder() / task).iterdir(), shared) if file.is_file())
    write_new_files(folder, {file.name: file.read_text(encoding="utf-8") for file in files})


async def make_demo_model(folder: Path, seed: int, progress: Progress) -> None:
    """Let the code in a demo's folder make its base model and its examples."""
    make_importable(folder)
    progress.message("making a base model from scratch, and warming it up until it speaks the format")
    build_base = import_object("base:build_base")
    await build_base(folder / "base", seed, lambda what, value: progress.phase(f"warming up: {what}"))


def examples_folder() -> Path:
    """Return the folder with an example for each task, in the installed package or the checkout.

    Raises RequestError if there is none.
    """
    # A wheel has them inside the package; a checkout has them next to `src`.
    for folder in (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples"):
        if folder.is_dir():
            return folder
    raise RequestError("the examples are not part of this installation; install etude again")
