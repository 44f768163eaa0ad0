"""The tasks of the demo; the example of the same name has the code and config of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from etude.core.errors import RequestError
from etude.store.files import write_new_files

_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Task:
    """Something to learn."""

    name: str
    introduction: str
    """Goes on after `A tiny model …`."""
    variants: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    """Other circumstances to measure the agent in, as overrides of the config, by what they are called."""


TASKS = {
    task.name: task
    for task in (
        Task("calculator", "learns to use a calculator: a question, a tool call, the result, the answer"),
        Task(
            "tictactoe",
            "learns tic-tac-toe against a random opponent; a random player who knows the rules gets 0.5",
            {"against an optimal opponent": (("workflow.arguments.opponent", "optimal"),)},
        ),
        Task("sort", "learns to sort letters"),
    )
}


def examples_folder() -> Path:
    """The folder with an example for each task: in the installed package, or in the checkout.

    Raises RequestError when there is none.
    """
    # In a wheel they are part of the package; in a checkout they lie beside `src`.
    for folder in (_PACKAGE / "examples", _PACKAGE.parents[1] / "examples"):
        if folder.is_dir():
            return folder
    raise RequestError("the examples are not part of this installation; install etude again")


def copy_example(task: str, folder: Path) -> None:
    """Copy an example's code, config and README into a new folder.

    Raises RequestError for an unknown task, or when the folder has files in it, StoreError when it
    cannot be written.
    """
    source = examples_folder() / task
    if not source.is_dir():
        raise RequestError(f"there is no example '{task}' in {source.parent}; install etude again")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RequestError(f"{folder} is there already and not empty; name another folder with --out")
    files = sorted(file for file in source.iterdir() if file.is_file())
    write_new_files(folder, {file.name: file.read_text(encoding="utf-8") for file in files})
