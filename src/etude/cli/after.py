"""Which hint suits the state of a run."""

from __future__ import annotations

from pathlib import Path

from etude.cli import hints
from etude.cli.console import Hint


def after_run(run: Path) -> Hint:
    """What to do with a stored run, whatever became of it. Raises StoreError when it cannot be read."""
    from etude.store.facts import facts_of

    facts = facts_of(run)
    if facts.in_use_by is not None:
        return hints.show(run)
    if facts.state == "unfinished":
        return hints.resume(run)
    return hints.rescore(run) if facts.kind == "evaluate" else after_training(run)


def after_stop(run: Path) -> Hint:
    """What to do with a run that was stopped or failed: go on, unless it had come to its end by then."""
    from etude.core.errors import EtudeError
    from etude.store.facts import SUMMARY

    try:
        return after_training(run) if (run / SUMMARY).is_file() else hints.resume(run)
    except EtudeError:
        return hints.resume(run)


def after_training(run: Path) -> Hint:
    """What to do with a run that is over: its model is in its folder, or at a backend, or there is none.

    Raises StoreError when the run cannot be read.
    """
    from etude.store.facts import histories_of
    from etude.store.figures import best_version, last_version
    from etude.store.stored_config import is_local
    from etude.store.versions import is_hosted

    histories = histories_of(run)
    if not any(history.trained for history in histories.values()):
        return _after_nothing(run)
    for target, history in histories.items():
        if is_hosted(run, last_version(history)):
            return hints.evaluate_version(run, target)
        version = best_version(history) or last_version(history)
        if version is not None and version.number and is_local(run, target):
            return hints.export(run, target)
    return hints.jobs(run)


def _after_nothing(run: Path) -> Hint:
    """A run that trained on nothing does not get further by going on."""
    from etude.store.episodes import phases_of
    from etude.store.run_folder import RunFolder

    with RunFolder.read(run) as folder:
        phases = [phase for phase in phases_of(folder.journal) if phase.startswith("train/")]
    return hints.read_episodes(run, phases[0]) if phases else hints.show(run)


def at_the_start() -> Hint:
    """What to do where there are no runs yet."""
    from etude.config.document import dig, read_document
    from etude.core.errors import EtudeError, MissingExtraError
    from etude.inference.local import require_local_extra

    config = Path("config.yml")
    try:
        if config.is_file() and dig(read_document(config).data, ("finetuning", "enabled")) is True:
            return hints.train(config)
        require_local_extra()
    except MissingExtraError:
        return hints.new_project()
    except EtudeError:
        pass  # The config cannot be read.
    return hints.try_demo()
