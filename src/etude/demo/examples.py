"""Where the examples are, and copies of them to work in."""

from __future__ import annotations

import shutil
from pathlib import Path

from etude.core.errors import RequestError, StoreError

_PACKAGE = Path(__file__).parents[1]


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
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            if file.is_file():
                shutil.copyfile(file, folder / file.name)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror}") from error


def new_folder(task: str, parent: Path) -> Path:
    """A folder for the task that is not there yet."""
    count, folder = 1, parent / f"demo-{task}"
    while folder.exists():
        count += 1
        folder = parent / f"demo-{task}-{count}"
    return folder
