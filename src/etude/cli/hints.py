"""The commands that are offered as the next thing to type, and which of them suits the state of a run.

A test puts a project into the state of each, and types it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from etude.cli.console import path_shown, typed_words, unused

if TYPE_CHECKING:
    from etude.core.history import History
    from etude.store.facts import RunFacts

Histories: TypeAlias = "Mapping[str | None, History]"
"""Of a run, by target."""


def _etude(*words: str | Path) -> str:
    """A command as one types it in a shell, with its paths as they are seen from here."""
    return shlex.join(["etude", *(path_shown(word) if isinstance(word, Path) else word for word in words)])


def try_demo() -> str:
    """Where there is nothing yet, and everything is installed."""
    return _etude("demo")


def demo_again(kind: Sequence[str], seed: int, out: Path | None) -> str:
    """A demo was stopped: it begins anew, in another folder."""
    folder = [] if out is None else ["--out", path_shown(unused(out))]
    return _etude("demo", *kind, "--seed", str(seed), *folder)


def new_project(model: str | None = None) -> str:
    """A project of one's own, with a model where one was spoken of."""
    return _etude("init", unused(Path("my_agent")), *([] if model is None else ["--model", model]))


def check_project(folder: Path) -> str:
    """A project was written."""
    return f"cd {shlex.quote(path_shown(folder))} && {_etude('check', 'config.yml')}"


def check_installation(output_dir: Path) -> str:
    """Nothing there can be read."""
    return _etude("doctor", "--output-dir", output_dir)


def check_config(config: Path) -> str:
    """The addresses of a config's models answer."""
    return _etude("check", config)


def train(config: Path, overrides: Sequence[str] = ()) -> str:
    """A config is ready."""
    return _etude("train", config, *_options(overrides))


def evaluate(config: Path, overrides: Sequence[str] = ()) -> str:
    """A config is ready, and trains nothing."""
    return _etude("evaluate", config, *_options(overrides))


def resume(run: Path) -> str:
    """A run was stopped, or failed half-way."""
    return _etude("resume", run)


def show(run: Path) -> str:
    """There is something to see of a run."""
    return _etude("runs", "show", run)


def list_episodes(run: Path) -> str:
    """A log was imported."""
    return _etude("episodes", run)


def show_episode(run: Path, episode: str) -> str:
    """Episodes were listed."""
    return _etude("episodes", "show", episode, "--run", run)


def check_run(run: Path) -> str:
    """The journal or the config of a run cannot be read."""
    return _etude("runs", "check", run)


def jobs(run: Path) -> str:
    """A backend trained, and made no version that has a name here."""
    return _etude("jobs", run)


def read_episodes(run: Path, phase: str) -> str:
    """Nothing could be trained on: the episodes show why."""
    return _etude("episodes", run, "--phase", phase)


def export(run: Path, target: str | None = None) -> str:
    """The trained weights are in the run folder."""
    return _etude("export", run, *([] if target is None else ["--version", target]))


def evaluate_version(run: Path, version: str | None = None) -> str:
    """A trained model can be asked for by the name of its run."""
    model = path_shown(run) if version is None else f"{path_shown(run)}:{version}"
    return _etude("evaluate", run / "config.yml", "--model", model)


def evaluate_exported(run: Path, folder: Path) -> str:
    """A model was exported. Of a run that a program began, no command has the parts to evaluate it."""
    from etude.store.stored_config import needs_program

    if needs_program(run):
        return new_project(path_shown(folder))
    return _etude("evaluate", run / "config.yml", "--model", folder)


def report(run: Path) -> str:
    """A tracker of a run was away."""
    return _etude("report", run)


def rescore(run: Path) -> str:
    """Episodes were scored: other evaluators can score them too."""
    return _etude("evaluate", "--rescore", run)


def again() -> str:
    """A command that goes on where it was stopped when it is typed again."""
    return _etude(*typed_words())


def _options(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("-o", override)]


def after_run(run: Path, facts: RunFacts | None = None, histories: Histories | None = None) -> str:
    """The next command for a stored run in any state. Raises StoreError when it cannot be read.

    `facts` and `histories` are the run's where they were read.
    """
    from etude.store.facts import facts_of

    facts = facts or facts_of(run, histories)
    if facts.in_use_by is not None:
        return show(run)
    if facts.state == "unreadable":
        return check_run(run)
    if facts.state == "unfinished":
        return resume(run)
    if facts.kind == "import":
        return list_episodes(run)
    return rescore(run) if facts.kind == "evaluate" else after_training(run, histories)


def after_stop(run: Path) -> str:
    """The next command after a stop or a failure: go on, unless the run had come to its end by then."""
    from etude.core.errors import EtudeError
    from etude.store.facts import SUMMARY

    try:
        return after_training(run) if (run / SUMMARY).is_file() else resume(run)
    except EtudeError:
        return resume(run)


def after_training(run: Path, histories: Histories | None = None) -> str:
    """The next command for a run that is over: its model is in its folder, or at a backend, or there is none.

    Raises StoreError when the run cannot be read.
    """
    from etude.store.facts import histories_of
    from etude.store.figures import best_version, last_version
    from etude.store.stored_config import is_local
    from etude.store.versions import is_hosted

    histories = histories or histories_of(run)
    if not any(history.trained for history in histories.values()):
        return _after_nothing(run)
    for target, history in histories.items():
        if is_hosted(run, last_version(history)):
            return evaluate_version(run, target)
        version = best_version(history) or last_version(history)
        if version is not None and version.number and is_local(run, target):
            return export(run, target)
    return jobs(run)


def _after_nothing(run: Path) -> str:
    """A run that trained on nothing does not get further by going on."""
    from etude.store.episodes import phases_of
    from etude.store.run_folder import RunFolder

    with RunFolder.read(run) as folder:
        phases = [phase for phase in phases_of(folder.journal) if phase.startswith("train/")]
    return read_episodes(run, phases[0]) if phases else show(run)


def at_the_start() -> str:
    """The next command where there are no runs yet."""
    from etude.config.document import dig, read_document
    from etude.core.errors import EtudeError, MissingExtraError
    from etude.inference.local import require_local_extra

    config = Path("config.yml")
    try:
        if config.is_file() and dig(read_document(config).data, ("finetuning", "enabled")) is True:
            return train(config)
        require_local_extra()
    except MissingExtraError:
        return new_project()
    except EtudeError:
        pass  # The config cannot be read.
    return try_demo()
