"""The commands that are suggested as the next step, and the choice between them by a run's state.

A test types each of them, in a project in the right state.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from etude.cli.console import shown_path, unused_folder
from etude.core.errors import EtudeError

if TYPE_CHECKING:
    from etude.core.history import History
    from etude.store.facts import RunFacts


def command(*words: str | Path) -> str:
    """Return a command as typed in a shell, with its paths as seen from the current folder."""
    return shlex.join(["etude", *(shown_path(word) if isinstance(word, Path) else word for word in words)])


def new_project(model: str | None = None) -> str:
    """Return the command that starts a new project, with `model` if given."""
    return command("init", unused_folder(Path("my_agent")), *([] if model is None else ["--model", model]))


def show(run: Path) -> str:
    """Return the command that shows a run."""
    return command("runs", "show", run)


def evaluate_version(run: Path, version: str | None = None) -> str:
    """Return the command that evaluates a trained model by the name of its run."""
    model = shown_path(run) if version is None else f"{shown_path(run)}:{version}"
    return command("evaluate", run / "config.yml", "--model", model)


def after_run(run: Path, facts: RunFacts | None = None) -> str:
    """Return the next command for a stored run in any state, with its `facts` if they were read already."""
    from etude.store.facts import read_facts

    facts = facts or read_facts(run)
    if facts.in_use_by is not None:
        return show(run)
    if facts.state == "unreadable":
        return command("runs", "check", run)
    if facts.state == "unfinished":
        return command("resume", run)
    if facts.kind == "import":
        return command("episodes", run)
    if facts.kind == "evaluate":
        return command("evaluate", "--rescore", run)
    return after_training(run, facts.histories)


def after_stop(run: Path) -> str:
    """Return the next command after a stop or a failure: resume, unless the run had finished."""
    from etude.store.facts import read_facts

    try:
        return after_training(run) if read_facts(run).ended is not None else command("resume", run)
    except EtudeError:
        return command("resume", run)


def after_training(run: Path, histories: Mapping[str | None, History] | None = None) -> str:
    """Return the next command for a finished run, whether its model is here, at a backend, or missing.

    Raises StoreError if the run cannot be read.
    """
    from etude.store.episodes import list_phases
    from etude.store.facts import is_hosted
    from etude.store.figures import best_version, last_version
    from etude.store.histories import read_histories
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import is_local

    histories = histories or read_histories(run)
    if not any(history.trained_epochs for history in histories.values()):
        # Resuming would not help this run.
        with RunFolder.read(run) as folder:
            phases = [phase for phase in list_phases(folder.journal) if phase.startswith("train/")]
        return command("episodes", run, "--phase", phases[0]) if phases else show(run)
    for target, history in histories.items():
        if is_hosted(run, last_version(history)):
            return evaluate_version(run, target)
        version = best_version(history) or last_version(history)
        if version is not None and version.number and is_local(run, target):
            return command("export", run, *([] if target is None else ["--version", target]))
    return command("jobs", run)
