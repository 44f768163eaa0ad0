"""Runs seen from outside: how far each has come, its versions by their names, and how several runs differ."""

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeAlias

from etude.config.document import KeyPath, join_path, leaves, value_at
from etude.core.errors import EtudeError, RequestError, nearest
from etude.core.history import History, Score
from etude.core.job import ModelVersion
from etude.core.keys import content_hash
from etude.core.stats import Estimate, estimate_difference, shared_bounds
from etude.store.database import DATABASE
from etude.store.episodes import list_phases, score_key, stored_episodes
from etude.store.figures import Summary, best_version, last_version, summary_in
from etude.store.histories import end_of_run, read_histories
from etude.store.journal import read_states
from etude.store.run_folder import LOCK, RunFolder, lock_holder
from etude.store.stored_config import EvaluationRequest, read_request, stored_data, trained_parts

State = Literal["running", "finished", "unfinished", "unreadable"]

STORAGE = "storage.json"
"""The state of a run's backup. Runs without a storage lack this file."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts of one run, seen from outside. Reading them disturbs no other process."""

    name: str
    path: Path
    kind: Literal["train", "evaluate", "import"]
    state: State
    changed: float
    """When the run's journal was last written; Unix seconds."""
    in_use_by: int | None = None
    """The id of the process that has the run open."""
    ended: str | None = None
    """When the run ended (ISO 8601, UTC), if it is over."""
    problem: str | None = None
    """Why the run is unreadable."""
    num_epochs: int | None = None
    """How many epochs the run was asked for."""
    method: str | None = None
    """`_type` of the trajectory builder."""
    backend: str | None = None
    """`_type` of the trainer adapter."""
    base: str | None = None
    """The model that training began with, as the config names it."""
    model: str | None = None
    """The model that an evaluation measured; a version of a run is written `run:v3`."""
    summary: Summary = field(default_factory=Summary)
    """The figures of a training run."""
    result: Mapping[str, Any] | None = None
    """The result of a finished evaluation (`EvaluationScores.as_json`) or import (`Imported`)."""
    storage: Mapping[str, Any] | None = None
    """The state of the run's backup, if there is one: `address`, `copied_at`, `last_error`."""
    histories: Mapping[str | None, History] = field(default_factory=dict, repr=False)
    """The epochs and validations by target; the key is None if the run trains one model."""

    def as_json(self) -> dict[str, Any]:
        """Return the facts as JSON, without the histories."""
        facts = asdict(replace(self, histories={}))
        del facts["histories"]
        summary = {} if self.state == "unreadable" else self.summary.as_json()
        return {**facts, "path": str(self.path), "summary": summary}

    @property
    def epochs_done(self) -> int:
        """How many epochs are over, including those with nothing to train on."""
        return self.summary.epochs_trained + self.summary.epochs_skipped

    @property
    def shown_state(self) -> str:
        """Whether the run is active, finished or unfinished, or why it cannot be read."""
        if self.in_use_by is not None:
            return f"running (process {self.in_use_by})"
        if self.problem is not None:
            return f"unreadable: {self.problem}"
        is_empty = self.kind == "train" and self.state == "finished" and not self.summary.epochs_trained
        return "finished, trained on nothing" if is_empty else self.state

    @property
    def shown_epochs(self) -> str | None:
        """The epochs as `3/10`; None for an evaluation, which has none."""
        if self.kind != "train" or self.state == "unreadable":
            return None
        return f"{self.epochs_done}/{self.num_epochs or '?'}"

    @property
    def first_and_last_reward(self) -> list[str | None]:
        """The first and last reward, of validations if there are any. Evaluations have only the last."""
        if self.kind == "evaluate":
            result = self.result or {}
            score = Score.model_validate((result.get("scores") or {}).get(result.get("reward")) or {})
            return [None, None if score.mean is None else str(score)]
        if not self.summary.targets:
            return self.summary.shown_ends()
        ends = {name: summary.shown_ends(short=True) for name, summary in self.summary.targets.items()}
        return [", ".join(f"{name} {own[when] or '–'}" for name, own in ends.items()) for when in (0, 1)]


def read_facts(path: Path, *, required: bool = False) -> RunFacts:
    """Return the facts of the run in a folder. If it cannot be read, they say why.

    Raises StoreError if the histories are `required`, and the journal cannot be read.
    """
    path = path.absolute()
    changed, known = _last_changed(path), dict[str | None, History]()
    try:
        with RunFolder.read(path) as run:
            request = read_request(run.journal)
            states = read_states(run.journal)
            known = {target: each.history for target, each in states.items()}
            storage = run.read_json(STORAGE)
        settings = stored_data(path, required=False)
        num_epochs = value_at(settings, ("finetuning", "num_epochs"))
        summary = summary_in(known, run.name, num_epochs)
        in_use_by = lock_holder(path / LOCK)
    except EtudeError as error:
        if required and not known:
            raise
        return RunFacts(path.name, path, "train", "unreadable", changed, problem=str(error), histories=known)
    parts = trained_parts(settings)
    targets = value_at(settings, ("finetuning", "targets"))
    for key in ("method", "backend") if targets else ():
        parts_of_targets = (trained_parts(settings, target)[key] for target in targets)
        parts[key] = ", ".join(filter(None, dict.fromkeys(parts_of_targets))) or None
    ended = end_of_run(states)
    result = None if ended is None else ended.result
    state: State = "running" if in_use_by is not None else "unfinished" if ended is None else "finished"
    return RunFacts(
        name=path.name,
        path=path,
        kind="evaluate" if request is not None else "train" if result is None else "import",
        state=state,
        changed=changed,
        in_use_by=in_use_by,
        ended=None if ended is None else ended.timestamp,
        num_epochs=num_epochs,
        **parts,
        model=None if request is None else evaluated_model(request, parts["base"]),
        summary=summary,
        result=result,
        storage=storage,
        histories=known,
    )


def imported_lines(counts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the counts of an imported log, as labels and texts."""
    scores = ", ".join(f"{name} ({count})" for name, count in counts["scores"].items())
    several = f"{counts['compared']} with several chats"
    return [
        ("chats", f"{counts['chats']} with {counts['calls']} calls"),
        ("prompts", f"{counts['prompts']}, {several}, {counts['held_out']} held out"),
        *([("feedback", scores)] if scores else []),
    ]


def list_runs(root: Path | str) -> list[Path]:
    """Return the run folders in `root`, the latest change first. A missing folder has no runs."""
    runs = [database.parent for database in Path(root).glob(f"[!.]*/{DATABASE}")]
    return sorted(runs, key=lambda run: (-_last_changed(run), run.name))


def _last_changed(run: Path) -> float:
    files = [file.stat() for file in (run / DATABASE, run / f"{DATABASE}-wal") if file.exists()]
    # An empty write-ahead log means nothing: every reader leaves one behind.
    return max((file.st_mtime for file in files if file.st_size or file is files[0]), default=0.0)


def is_run(path: Path) -> bool:
    """Return whether there is a run folder at `path`."""
    return os.path.isfile(path / DATABASE)  # noqa: PTH113  `Path.is_file` raises for a name that is too long


def find_run(text: str, root: Path) -> Path:
    """Return the run folder that `text` names: a folder, or a name in `root`. Raises RequestError."""
    paths = (Path(text), root / text)
    for path in filter(is_run, paths):
        return path.absolute()
    for path in filter(os.path.isdir, paths):
        if (path / LOCK).is_file() or not any(path.iterdir()):
            raise RequestError(
                f"run {path.name} was stopped before it stored anything, so there is nothing to continue. "
                f"Start it again as before, with --name {shlex.quote(path.name)}"
            )
    names = [run.name for run in list_runs(root)]
    hint = f", and there are no runs in {root}; name another folder as the output_dir"
    if names:
        close = nearest(Path(text).name, names)
        hint = (
            f"; did you mean '{close}'?" if close else f"; the latest in {root} are: {', '.join(names[:5])}"
        )
    raise RequestError(f"there is no run '{text}'{hint}")


def latest_unfinished(root: Path) -> Path:
    """Return the last changed run that is neither finished nor in use. Raises RequestError."""
    for run in list_runs(root):
        if read_facts(run).state == "unfinished":
            return run.absolute()
    listing = f"etude runs list --output-dir {shlex.quote(str(root))}"
    raise RequestError(f"there is no unfinished run in {root}; list its runs with: {listing}")


# Names of versions: `RUN`, `RUN:v3`, `RUN:best`, `RUN:last`, `RUN:base`, and `RUN:warm-up` after a warm-up.
# In a run that trains several models, the name has the target too: `RUN:verifier`, `RUN:verifier:v3`.
BEST, LAST, BASE, WARM_UP = "best", "last", "base", "warm-up"

_NUMBER = re.compile(r"v?\d+")


@dataclass(frozen=True, slots=True)
class RunVersion:
    """One version of a model that a run trains."""

    run: Path
    version: ModelVersion | None
    """None for the base model."""
    target: str | None = None
    """The target that the version is from, in a run that trains several models."""
    choice: str = field(default="", compare=False)
    """Why this version was chosen, if none was named."""

    @property
    def number(self) -> int:
        """The number of the version; 0 is the base model."""
        return 0 if self.version is None else self.version.number

    @property
    def folder(self) -> Path | None:
        """The folder of its weights in the run folder. None for the base model and a backend's weights."""
        return None if self.version is None else stored_at(self.run, self.version)

    def __str__(self) -> str:
        return f"{self.run.name}:{version_name(self.number, self.target)}"


def version_name(number: int | None, target: str | None) -> str:
    """Return how a version is written after the name of its run: `v3` or `base`, or `verifier:v3`."""
    name = f"v{number}" if number else BASE
    return name if target is None else f"{target}:{name}"


def evaluated_model(request: EvaluationRequest, base: str | None) -> str | None:
    """Return the evaluated model: `run:v3`, or else `base`, the model that the config names."""
    if request.run is None:
        return base
    return f"{Path(request.run).name}:{version_name(request.version, request.target)}"


def run_version(text: str, root: Path) -> RunVersion | None:
    """Return the version that `RUN` or `RUN:version` names, or None if there is no such run.

    Raises RequestError when the run has no such version.
    """
    parts = text.split(":")
    for count in range(len(parts), 0, -1):
        name, wish = ":".join(parts[:count]), ":".join(parts[count:])
        if is_run(Path(name)) or is_run(root / name):
            return choose_version(find_run(name, root), wish)
    return None


def choose_version(run: Path, wish: str = "", *, kept: bool = True) -> RunVersion:
    """Return the version of a run that `wish` names.

    `best` is the version with the best validation. An empty wish means the best version if one was measured
    after training, else the last. Raises RequestError when there is no such version. With `kept`, also raises
    it when the weights are not on the disk.
    """
    histories, target, wish = read_histories(run), None, str(wish)
    if None not in histories:
        target, _, wish = wish.partition(":")
    if target not in histories:
        ends = [f"{name}:{LAST if best_version(own) is None else BEST}" for name, own in histories.items()]
        text = f"run {run.name} trains several models; name one and its version"
        raise RequestError(f"{text}: {', '.join(ends)}, after --version or '{run.name}:'")
    history, choice = histories[target], ""
    if wish in (BASE, "v0", "0"):
        version = None
    elif wish in (BEST, LAST, ""):
        version, choice = _best_or_last(wish, history, run, target)
    elif wish == WARM_UP and history.start is not None:
        version = history.start
    else:
        version = _numbered_version(wish, history, run)
    wanted = RunVersion(run, version, target, choice)
    if kept and (folder := wanted.folder) is not None and not folder.exists():
        raise RequestError(
            f"the weights of v{wanted.number} of run {wanted.run.name} were not kept; there are "
            f"{_list_numbers(_kept_in(folder.parent))}. `etude export` trains "
            "it again. The trainer's `keep_checkpoints` says how many are kept, and the adapter's "
            "`checkpoint_seconds` how often one is written"
        )
    return wanted


def _numbered_version(wish: str, history: History, run: Path) -> ModelVersion:
    versions = (history.start, *(entry.version for entry in history.epochs))
    known = {version.number: version for version in versions if version is not None}
    numbers = _list_numbers(number for number in known if number)
    if _NUMBER.fullmatch(wish) is None:
        raise RequestError(f"'{wish}' is not a version; write {BEST}, {LAST}, {BASE}, or a number: {numbers}")
    version = known.get(int(wish.removeprefix("v")))
    if version is None:
        raise RequestError(f"run {run.name} has no version v{wish.removeprefix('v')}; it has {numbers}")
    return version


def describe_kept(run: Path, history: History) -> str | None:
    """Return which trained versions are on the disk, in words. None if all are, or a backend has them."""
    versions = {one.number: one for entry in history.trained_epochs if (one := entry.version) is not None}
    folder = stored_at(run, versions[max(versions)]) if versions else None
    if folder is None or versions.keys() <= set(kept := _kept_in(folder.parent)):
        return None
    return f"{_list_numbers(number for number in kept if number in versions)} of {len(versions)} versions"


def _kept_in(folder: Path) -> list[int]:
    return [int(path.name[1:]) for path in folder.glob("v*") if path.name[1:].isdigit()]


def stored_at(run: Path, version: ModelVersion) -> Path | None:
    """Return the folder of a version's weights in the run folder, or None if a backend has them."""
    parts = Path(version.location).parts
    if "checkpoints" not in parts:
        return None
    # Relative to the folder as it is now, because the run may have been moved.
    return run.joinpath(*parts[len(parts) - 1 - parts[::-1].index("checkpoints") :])


def is_hosted(run: Path, version: ModelVersion | None) -> bool:
    """Return whether a backend has a version's weights, and the run folder does not."""
    return version is not None and version.number > 0 and stored_at(run, version) is None


def _best_or_last(
    wish: str, history: History, run: Path, target: str | None
) -> tuple[ModelVersion | None, str]:
    """Return the version, or None for the base model, and why it was chosen."""
    best, last = best_version(history), last_version(history)
    whose = run.name if target is None else f"{run.name}:{target}"
    if last is None:
        why = {"unfinished": f" yet; continue it: etude resume {shlex.quote(str(run))}", "running": " yet"}
        none = why.get(read_facts(run).state, ": it trained on nothing, or its backend keeps the versions")
        raise RequestError(
            f"run {whose} has no trained version{none}; {whose}:{BASE} is the model that it started from"
        )
    if wish == BEST and best is None:
        raise RequestError(
            f"run {whose} has not measured any version after training it, so the best is not known; "
            f"{whose}:{LAST} is the last one, v{last.number}. Validations of held-out "
            "examples ('finetuning.run_configuration.validation_dataset') measure them"
        )
    if wish == LAST:
        chosen, choice = last, "the last version"
    elif best is None:
        chosen, choice = last, "the last version; none was measured after it was trained"
    else:
        chosen, choice = best, "the version with the best validation"
    if not chosen.number:
        return None, f"{choice}, which is the base model: no trained version has done better"
    return chosen, choice


def _list_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(f"v{number}" for number in sorted(numbers)) or "none"


MeasuredExample: TypeAlias = tuple[str, str]
"""The id of an example, and a hash of its inputs and its expected answer, since a data set may change."""


def differing_settings(runs: Sequence[Path]) -> dict[str, list[Any]]:
    """Return the keys in which the runs' configs differ, with the value in each (None if it lacks the key).

    For evaluations, `evaluate` has the model, the episodes for each example, and whether it was greedy.
    """
    settings: list[dict[KeyPath, Any]] = []
    for run in runs:
        with RunFolder.read(run) as folder:
            data, request = stored_data(run, required=False), read_request(folder.journal)
        if request is not None:
            model = evaluated_model(request, trained_parts(data)["base"])
            data = {"evaluate": {"model": model, "repeat": request.repeat, "greedy": request.greedy}, **data}
        settings.append(dict(leaves(data)))
    # These keys only say where files are.
    places = ((), ("finetuning", "output_dir"), ("finetuning", "run_configuration", "config_file"))
    keys = dict.fromkeys(key for setting in settings for key in setting if key not in places)
    values = {key: [setting.get(key) for setting in settings] for key in keys}
    return {join_path(key): each for key, each in values.items() if any(value != each[0] for value in each)}


def paired_differences(first: Path, second: Path) -> dict[str, Estimate]:
    """Return how much higher the second run's scores are, by each evaluator that both runs have.

    The mean scores are paired by example, so that the difficulty of examples cancels out. Evaluators with
    fewer than two examples in common are left out.
    """
    old_scores, new_scores = stored_scores(first), stored_scores(second)
    differences = {}
    for evaluator, old in old_scores.items():
        new = new_scores.get(evaluator, {})
        if len(common := [example for example in old if example in new]) >= 2:
            bounds = shared_bounds(
                score.get("bounds") for scores in chain(old.values(), new.values()) for score in scores
            )
            before, after = (
                [fmean(each["score"] for each in scores[example]) for example in common]
                for scores in (old, new)
            )
            differences[evaluator] = estimate_difference(before, after, bounds)
    return differences


def stored_scores(run: Path) -> dict[str, dict[MeasuredExample, list[Mapping[str, Any]]]]:
    """Return the scores in a run's evaluation, or else in its last validation, by evaluator and example."""
    evaluators = value_at(stored_data(run, required=False), ("eval", "evaluators")) or {}
    scores: dict[str, dict[MeasuredExample, list[Mapping[str, Any]]]] = {name: {} for name in evaluators}
    with RunFolder.read(run) as folder:
        phases = [
            phase for phase in list_phases(folder.journal) if not phase.startswith(("train/", "warm-up/"))
        ]
        for key, data in stored_episodes(folder.journal, f"{phases[0]}/") if phases else ():
            row = data["example"]
            example = (row["id"], content_hash([row["inputs"], row["expected"]]))
            for evaluator, own in scores.items():
                stored = folder.journal.get(score_key(key, evaluator)) or {}
                if stored.get("score") is not None:
                    own.setdefault(example, []).append(stored)
    return scores
