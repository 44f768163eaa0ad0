"""Finding a run by what a person types."""

from __future__ import annotations

import shlex
from pathlib import Path

from etude.config.nearest import nearest
from etude.core.errors import RequestError
from etude.store.facts import facts_of
from etude.store.run_folder import DATABASE
from etude.store.run_list import list_runs


def is_run(path: Path) -> bool:
    """Whether there is a run folder at `path`."""
    return (path / DATABASE).is_file()


def find_run(text: str, root: Path) -> Path:
    """The run folder that `text` names: a folder, or a name in `root`. Raises RequestError."""
    for path in (Path(text), root / text):
        if is_run(path):
            return path.absolute()
    there = [run.name for run in list_runs(root)]
    close = nearest(Path(text).name, there)
    if close:
        hint = f"; did you mean '{close}'?"
    elif there:
        hint = f"; the latest in {root} are: {', '.join(there[:5])}"
    else:
        hint = f", and there are no runs in {root}; another place is named with --output-dir"
    raise RequestError(f"there is no run '{text}'{hint}")


def latest_unfinished(root: Path) -> Path:
    """The run in `root` that was changed last, of those that are neither finished nor in use.

    Raises RequestError when there is none.
    """
    for run in list_runs(root):
        if facts_of(run.path).state == "unfinished":
            return run.path.absolute()
    raise RequestError(
        f"there is no unfinished run in {root}; for those that there are: "
        f"etude runs list --output-dir {shlex.quote(str(root))}"
    )
