"""Resuming a run, and going back from damaged versions.

Epochs after the last whole version are trained again, on the episodes that are in the journal.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias, get_args

from etude.config.component import CHANGEABLE
from etude.config.document import (
    KeyPath,
    Override,
    join_dotted,
    join_path,
    parse_value,
    read_override,
    value_at,
)
from etude.config.key_types import changeable_keys, slot_in
from etude.config.load import Declared, load_config, parse_config, resolved_yaml
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.core.history import History, Recovery, WentBack
from etude.core.job import ModelVersion
from etude.core.records import ModelState, Reopened
from etude.core.secrets import MASK, holds_secret
from etude.loop.bookkeeper import Bookkeeper
from etude.rollout.evaluation import forget_failures
from etude.store.backup import Restored, restore_run, split_run_address
from etude.store.database import DATABASE, journal_damage, open_database
from etude.store.episodes import phase_stage
from etude.store.facts import stored_at
from etude.store.figures import last_version
from etude.store.files import damage_in
from etude.store.histories import end_of_run, read_histories
from etude.store.journal import ModelLog, read_states
from etude.store.run_folder import CONFIG, LOCK, RunFolder, RunLock
from etude.store.stored_config import stored_data, stored_text, trained_parts

_NUM_EPOCHS, _ALARMS = "finetuning.num_epochs", "finetuning.alarms"


def config_to_resume(run: Path, overrides: Iterable[str | Override]) -> Config:
    """Return the config of a stored run, with the overrides applied. Raises RequestError when an override
    would make this another run, and StoreError or ConfigError when the config cannot be read."""
    kept, changes = stored_data(run), [*map(read_override, overrides)]
    config = load_config(run / CONFIG, changes, text=stored_text(run))
    for change in changes:
        path = change.path
        # A key inside a changeable one, such as an option of a storage's driver, is changeable too.
        slots = (slot_in(config, path[: depth + 1]) for depth in range(len(path)))
        is_changeable = any(slot is not None and CHANGEABLE in slot.metadata for slot in slots)
        slot = slot_in(config, path)
        is_declared = slot is not None and any(arm.annotation in get_args(Declared) for arm in slot.arms())
        is_secret = is_declared or holds_secret(str(path[-1]), str(change.value))
        before = value_at(kept, path)
        if not is_changeable and not is_secret and before not in (MASK, change.value):
            raise RequestError(
                f"{change.source}: the run was begun with {join_path(path)}: {before!r:.80}, and what it "
                "has done rests on that. Leave it out, or start a new run: etude train\nThis can be changed: "
                f"{', '.join(changeable_keys(config))}; and secrets can be given again"
            )
    return config


def storage_options(overrides: Iterable[str | Override]) -> dict[str, Any]:
    """Return the options of a storage driver from overrides, for a run whose config is in that storage."""
    changes = map(read_override, overrides)
    storage_options = [each for each in changes if each.path[:2] == ("storage", "options")]
    config = parse_config({"storage": {"address": "file:///"}}, storage_options)
    return {} if config.storage is None else config.storage.options


def restore(
    address: str, root: Path, overrides: Iterable[str | Override]
) -> tuple[Restored, list[str | Override]]:
    """Restore a run from its backup into `root`. Return it, with the overrides to resume it by: they back it
    up to its old address, if its config does not. Raises as `restore_run` does."""
    changes = [*overrides]
    restored = restore_run(address, root, storage_options(changes))
    parent, _ = split_run_address(address)
    if value_at(stored_data(restored.run), ("storage", "address")) != parent:
        changes.append(f"storage.address={parent}")
    return restored, changes


async def note_changes(run: RunFolder, config: Config) -> dict[str, tuple[Any, Any]]:
    """Store changed settings in the run folder. Return the old and new value of each, by its key.

    With another number of epochs, or other alarms, a finished run goes on. Raises RequestError when the run
    has done more epochs already.
    """
    stored, now = stored_data(run.path), parse_value(resolved_yaml(config))
    states = read_states(run.journal)
    keys = [tuple(join_dotted(now, key.split("."))) for key in changeable_keys(config)]
    changed = {
        join_path(key): (value_at(stored, key), value_at(now, key))
        for key in keys
        if value_at(stored, key) != value_at(now, key)
    }
    if _NUM_EPOCHS in changed:
        num_epochs = config.finetuning.num_epochs
        done = max(len(each.epochs) for each in states.values())
        if num_epochs < done:
            raise RequestError(
                f"-o {_NUM_EPOCHS}={num_epochs}: run {run.name} has done {done} epochs already; "
                f"ask for {done} or more"
            )
    reopening = [key for key in changed if key in (_NUM_EPOCHS, _ALARMS) or key.startswith("trainers.")]
    for target, each in states.items():
        if reopening and each.end is not None:
            # Recorded first: if the process is killed before it stores the settings, the run ends again.
            await ModelLog(run.journal, target).add(Reopened(settings=tuple(reopening)))
    if changed:
        await run.change_config(resolved_yaml(config))
    return changed


def without_changeable(data: dict[str, Any], config: Config) -> dict[str, Any]:
    """Return a stored config without the settings that may change in a run: the rest identifies the run."""
    changeable = set(changeable_keys(config))

    def prune(value: Any, path: KeyPath) -> Any:
        if not isinstance(value, dict):
            return value
        inside = {key: prune(item, (*path, key)) for key, item in value.items()}
        return {key: item for key, item in inside.items() if join_path((*path, key)) not in changeable}

    return dict(prune(data, ()))


async def retry_failed(run: RunFolder) -> Counter[str] | None:
    """Forget the failures in unfinished epochs that were not the agent's own. Return their counts by kind, or
    None when the run is finished. Raises StoreError."""
    by_target = read_states(run.journal)
    if end_of_run(by_target) is not None:
        return None
    states = by_target.values()
    recorded = {
        # A model that rested in an epoch was not trained on its episodes.
        "train": {number for past in states for number, each in past.epochs.items() if each.resting is None},
        "validation": {number for past in states for number in past.validations},
    }

    def is_open(episode_id: str) -> bool:
        if (stage := phase_stage(episode_id)) is None:
            return True
        phase, epoch = stage
        submitted = phase == "train" and any((epoch - 1, 1) in past.submissions for past in states)
        return epoch not in recorded[phase] and not submitted

    return await forget_failures(run.journal, is_open)


FindDamage: TypeAlias = Callable[[ModelVersion], Awaitable[list[str]]]
"""Returns how the stored weights of a version are damaged: a clause for each file."""

_BASE = ModelVersion(number=0, location="", digest="")


async def recover(books: Bookkeeper) -> None:
    """If the version to continue from is damaged or missing, go back to the last whole one, and report that.

    A version may have been adopted before a kill, without a record of its epoch. It is made again quietly.
    """
    log, adapter, run = books.log, books.adapter, books.runtime.run
    recovery = await find_recovery(log.state, adapter.damage)
    if recovery is None:
        adopted, recorded = log.state.versions.get(log.state.last_number), last_version(log.state.history)
        is_newer = adopted is not None and adopted.version.number > (recorded or _BASE).number
        if adopted is not None and is_newer and await adapter.damage(adopted.version):
            await log.add(WentBack(epoch=max(log.state.epochs, default=0), back_to=recorded))
        return
    digests = {version.digest for version in recovery.lost}
    for key, versions in [*run.journal.scan("opponents/")]:
        # Opponents that were to be lost versions are drawn again from the new versions.
        if any(version["digest"] in digests for version in versions):
            await run.journal.forget(key)
    await adapter.go_back(recovery.back_to or _BASE)
    # Recorded last, so that a run that was killed before this goes back again.
    await log.add(recovery)
    books.runtime.progress.message(str(recovery), warning=True)


async def find_recovery(known: ModelState, find_damage: FindDamage) -> Recovery | None:
    """Return how to go back from the last version; None if it and the warm-up's weights are whole.

    If the weights that training began with are damaged, everything is done again.
    """
    history, start = known.history, known.history.start
    if start is not None and (damage := await find_damage(start)):
        return _make_recovery(history, damage, 0, None, keeps_warm_up=False)
    if history.warm_up is None and not history.epochs and known.warm_up_jobs:
        start = known.warm_up_jobs[-1].version
    # One after the other: nearly always the first is whole, and a run may have thousands.
    steps = ((each.epoch, each.version) for each in reversed(history.epochs))
    damaged: dict[int, list[str]] = {}
    whole: tuple[int, ModelVersion | None] = (0, None)
    for epoch, version in chain(steps, [(0, start)]):
        # An epoch without training has the version of the one before.
        if version is not None and version.number not in damaged:
            if not (damage := await find_damage(version)):
                whole = (epoch, version)
                break
            damaged[version.number] = damage
    if not damaged:
        return None
    lost = [clause for clauses in reversed(damaged.values()) for clause in clauses]
    return _make_recovery(history, lost, *whole, keeps_warm_up=whole[1] is not None)


def _make_recovery(
    history: History, damage: Sequence[str], epoch: int, version: ModelVersion | None, *, keeps_warm_up: bool
) -> Recovery:
    later = [entry for entry in history.epochs if entry.epoch > epoch]
    versions = {entry.version.number: entry.version for entry in later if entry.version is not None}
    if history.start is not None and not keeps_warm_up:
        versions[history.start.number] = history.start
    return Recovery(
        epoch=epoch,
        back_to=version,
        keeps_warm_up=keeps_warm_up,
        damage=tuple(damage),
        lost=tuple(versions[number] for number in sorted(versions) if number > (version or _BASE).number),
        epochs=tuple(entry.epoch for entry in later),
    )


_VERSION = re.compile(r"v(\d+)")


def check_journal(run: Path) -> list[str]:
    """Return how the journal of a run is damaged, in sentences. Raises StoreError when the run is in use."""
    with RunLock(run / LOCK), closing(open_database(run / DATABASE, read_only=True)) as connection:
        return journal_damage(connection)


def check_files(run: Path) -> list[str]:
    """Return how the versions of a run are damaged, in clauses that name the files. Raises StoreError."""
    with RunLock(run / LOCK):
        stored_folders = sorted(path for path in (run / "bases").glob("*") if path.is_dir())
        stored = sorted((run / "checkpoints").rglob("v*"))
        stored_folders += [path for path in stored if path.is_dir() and _VERSION.fullmatch(path.name)]
        for target, history in read_histories(run).items():
            # Versions of adapters other than `local` are not here.
            if trained_parts(stored_data(run, required=False), target)["backend"] != "local":
                continue
            versions = (history.start, last_version(history))
            places = [stored_at(run, each) for each in versions if each is not None and each.number]
            stored_folders += [folder for folder in places if folder is not None]
        folders = dict.fromkeys(stored_folders)
        # With the model's name, if several are trained.
        names = [f"{folder.parent.relative_to(run)}/".removeprefix("checkpoints/") for folder in folders]
        named = zip(names, folders, strict=True)
        return [f"{name}{clause}" for name, folder in named for clause in damage_in(folder)]
