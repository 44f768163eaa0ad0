"""The commands that are offered as the next thing to type, and which of them suits the state of a run.

A test puts a project into the state of each, and types it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from etude.cli.console import path_shown, unused
from etude.core.errors import EtudeError, MissingExtraError

if TYPE_CHECKING:
    from etude.core.history import History
    from etude.store.facts import RunFacts

Histories: TypeAlias = "Mapping[str | None, History]"
"""Of a run, by target."""


def command(*words: str | Path) -> str:
    """A command as one types it in a shell, with its paths as they are seen from here."""
    return shlex.join(["etude", *(path_shown(word) if isinstance(word, Path) else word for word in words)])


def new_project(model: str | None = None) -> str:
    """A project of one's own, with a model where one was spoken of."""
    return command("init", unused(Path("my_agent")), *([] if model is None else ["--model", model]))


def resume(run: Path) -> str:
    """A run was stopped, or failed half-way."""
    return command("resume", run)


def show(run: Path) -> str:
    """There is something to see of a run."""
    return command("runs", "show", run)


def evaluate_version(run: Path, version: str | None = None) -> str:
    """A trained model can be asked for by the name of its run."""
    model = path_shown(run) if version is None else f"{path_shown(run)}:{version}"
    return command("evaluate", run / "config.yml", "--model", model)


def evaluate_exported(run: Path, folder: Path) -> str:
    """A model was exported. Of a run that a program began, no command has the parts to evaluate it."""
    from etude.store.stored_config import needs_program

    if needs_program(run):
        return new_project(path_shown(folder))
    return command("evaluate", run / "config.yml", "--model", folder)


def after_run(run: Path, facts: RunFacts | None = None, histories: Histories | None = None) -> str:
    """The next command for a stored run in any state. Raises StoreError when it cannot be read.

    `facts` and `histories` are the run's where they were read.
    """
    from etude.store.facts import facts_of

    facts = facts or facts_of(run, histories)
    if facts.in_use_by is not None:
        return show(run)
    if facts.state == "unreadable":
        return command("runs", "check", run)
    if facts.state == "unfinished":
        return resume(run)
    if facts.kind == "import":
        return command("episodes", run)
    if facts.kind == "evaluate":
        return command("evaluate", "--rescore", run)
    return after_training(run, histories)


def after_stop(run: Path) -> str:
    """The next command after a stop or a failure: go on, unless the run had come to its end by then."""
    from etude.store.facts import SUMMARY

    try:
        return after_training(run) if (run / SUMMARY).is_file() else resume(run)
    except EtudeError:
        return resume(run)


def after_training(run: Path, histories: Histories | None = None) -> str:
    """The next command for a run that is over: its model is in its folder, or at a backend, or there is none.

    Raises StoreError when the run cannot be read.
    """
    from etude.store.episodes import phases_of
    from etude.store.facts import histories_of
    from etude.store.figures import best_version, last_version
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import is_local
    from etude.store.versions import is_hosted

    histories = histories or histories_of(run)
    if not any(history.trained for history in histories.values()):
        # It does not get further by going on.
        with RunFolder.read(run) as folder:
            phases = [phase for phase in phases_of(folder.journal) if phase.startswith("train/")]
        return command("episodes", run, "--phase", phases[0]) if phases else show(run)
    for target, history in histories.items():
        if is_hosted(run, last_version(history)):
            return evaluate_version(run, target)
        version = best_version(history) or last_version(history)
        if version is not None and version.number and is_local(run, target):
            return command("export", run, *([] if target is None else ["--version", target]))
    return command("jobs", run)


def at_the_start() -> str:
    """The next command where there are no runs yet."""
    from etude.config.document import dig, read_document
    from etude.inference.local import require_local_extra

    config = Path("config.yml")
    try:
        if config.is_file() and dig(read_document(config).data, ("finetuning", "enabled")) is True:
            return command("train", config)
        require_local_extra()
    except MissingExtraError:
        return new_project()
    except EtudeError:
        pass  # The config cannot be read.
    return command("demo")
