"""The commands that are offered as the next thing to type, and which of them suits the state of a run.

A test puts a project into the state of each, and types it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ParamSpec

from etude.cli.console import AND, Hint, path_shown, typed_words

P = ParamSpec("P")

HINTS: dict[str, Callable[..., Hint]] = {}
"""Every hint that there is, by the name of its function."""


def _hint(words: Callable[P, Sequence[str]]) -> Callable[P, Hint]:
    """Declares the words of a command as a hint."""

    @functools.wraps(words)
    def made(*args: P.args, **kwargs: P.kwargs) -> Hint:
        return Hint(words.__name__, tuple(words(*args, **kwargs)))

    HINTS[words.__name__] = made
    return made


@_hint
def try_demo() -> Sequence[str]:
    """Where there is nothing yet, and everything is installed."""
    return ["etude", "demo"]


@_hint
def demo_again(task: str, method: str, seed: int, out: Path | None) -> Sequence[str]:
    """A demo was stopped: it begins anew, in another folder."""
    folder = [] if out is None else ["--out", path_shown(_free(out))]
    return ["etude", "demo", "--task", task, "--method", method, "--seed", str(seed), *folder]


@_hint
def new_project(model: str | None = None) -> Sequence[str]:
    """A project of one's own, with a model where one was spoken of."""
    folder = path_shown(_free(Path("my_agent")))
    return ["etude", "init", folder, *([] if model is None else ["--model", model])]


@_hint
def check_project(folder: Path) -> Sequence[str]:
    """A project was written."""
    return ["cd", path_shown(folder), AND, "etude", "check", "config.yml"]


@_hint
def check_installation(output_dir: Path) -> Sequence[str]:
    """Nothing there can be read."""
    return ["etude", "doctor", "--output-dir", path_shown(output_dir)]


@_hint
def train(config: Path, overrides: Sequence[str] = ()) -> Sequence[str]:
    """A config is ready."""
    return ["etude", "train", path_shown(config), *_options(overrides)]


@_hint
def evaluate(config: Path, overrides: Sequence[str] = ()) -> Sequence[str]:
    """A config is ready, and trains nothing."""
    return ["etude", "evaluate", path_shown(config), *_options(overrides)]


@_hint
def resume(run: Path) -> Sequence[str]:
    """A run was stopped, or failed half-way."""
    return ["etude", "resume", path_shown(run)]


@_hint
def show(run: Path) -> Sequence[str]:
    """There is something to see of a run."""
    return ["etude", "runs", "show", path_shown(run)]


@_hint
def jobs(run: Path) -> Sequence[str]:
    """A backend trained, and made no version that has a name here."""
    return ["etude", "jobs", path_shown(run)]


@_hint
def read_episodes(run: Path, phase: str) -> Sequence[str]:
    """Nothing could be trained on: the episodes show why."""
    return ["etude", "transcripts", path_shown(run), "--phase", phase]


@_hint
def export(run: Path, target: str | None = None) -> Sequence[str]:
    """The trained weights are in the run folder."""
    return ["etude", "export", path_shown(run), *([] if target is None else ["--version", target])]


@_hint
def evaluate_version(run: Path, version: str | None = None) -> Sequence[str]:
    """A trained model can be asked for by the name of its run."""
    model = path_shown(run) if version is None else f"{path_shown(run)}:{version}"
    return ["etude", "evaluate", path_shown(run / "config.yml"), "--model", model]


@_hint
def evaluate_exported(run: Path, folder: Path) -> Sequence[str]:
    """A model was exported."""
    return ["etude", "evaluate", path_shown(run / "config.yml"), "--model", path_shown(folder)]


@_hint
def rescore(run: Path) -> Sequence[str]:
    """Episodes were scored: other evaluators can score them too."""
    return ["etude", "evaluate", "--rescore", path_shown(run)]


@_hint
def again() -> Sequence[str]:
    """A command that goes on where it was stopped when it is typed again."""
    return ["etude", *typed_words()]


def _free(folder: Path) -> Path:
    """The folder, or one with a number after its name, that is not there yet."""
    count, free = 1, folder
    while free.exists():
        count += 1
        free = folder.with_name(f"{folder.name}_{count}")
    return free


def _options(overrides: Sequence[str]) -> list[str]:
    return [word for override in overrides for word in ("-o", override)]


def after_run(run: Path) -> Hint:
    """The next command for a stored run in any state. Raises StoreError when it cannot be read."""
    from etude.store.facts import facts_of

    facts = facts_of(run)
    if facts.in_use_by is not None:
        return show(run)
    if facts.state == "unfinished":
        return resume(run)
    return rescore(run) if facts.kind == "evaluate" else after_training(run)


def after_stop(run: Path) -> Hint:
    """The next command after a stop or a failure: go on, unless the run had come to its end by then."""
    from etude.core.errors import EtudeError
    from etude.store.facts import SUMMARY

    try:
        return after_training(run) if (run / SUMMARY).is_file() else resume(run)
    except EtudeError:
        return resume(run)


def after_training(run: Path) -> Hint:
    """The next command for a run that is over: its model is in its folder, or at a backend, or there is none.

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
            return evaluate_version(run, target)
        version = best_version(history) or last_version(history)
        if version is not None and version.number and is_local(run, target):
            return export(run, target)
    return jobs(run)


def _after_nothing(run: Path) -> Hint:
    """A run that trained on nothing does not get further by going on."""
    from etude.store.episodes import phases_of
    from etude.store.run_folder import RunFolder

    with RunFolder.read(run) as folder:
        phases = [phase for phase in phases_of(folder.journal) if phase.startswith("train/")]
    return read_episodes(run, phases[0]) if phases else show(run)


def at_the_start() -> Hint:
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
