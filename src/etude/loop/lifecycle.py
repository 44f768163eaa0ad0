"""Beginning a run, and going on with it: which settings may change, and which failures are forgotten."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from etude.backup.address import address_of_run
from etude.config.component import CHANGEABLE
from etude.config.document import KeyPath, dig, dotted, parse_value
from etude.config.load import Declared, load_config, parse_config, resolved_yaml
from etude.config.nearest import nearest
from etude.config.schema import Config
from etude.config.slots import changeable_keys, slot_in
from etude.core.errors import RequestError
from etude.core.secrets import MASK, holds_secret
from etude.rewards.evaluation_run import forget_failures
from etude.store.facts import SUMMARY
from etude.store.log import EpochLog, histories
from etude.store.run_folder import RunFolder, new_run_name
from etude.store.stored_config import (
    CONFIG,
    REQUEST,
    RESULT,
    EvaluationRequest,
    bring_back_config,
    config_text,
    stored_data,
)

_EPOCH = re.compile(r"(train|validation)/(\d+)(?!\w)")


@contextmanager
def new_run(
    config: Config, name: str | None = None, request: EvaluationRequest | None = None
) -> Iterator[RunFolder]:
    """An open run folder in the config's output folder; with `request` it is one of an evaluation.

    When the block raises RequestError and nothing was journalled, the folder is deleted: it would only
    be in the way of the next try. Raises RequestError when the run exists, StoreError when its folder
    cannot be made.
    """
    root = config.finetuning.output_dir.absolute()
    if name is None and request is not None:
        name = new_run_name(root, "evaluation-")
    files = {CONFIG: config_text(resolved_yaml(config))}
    if request is not None:
        files[REQUEST] = request.model_dump_json(indent=2) + "\n"
    with RunFolder.create(root, name, files=files, seed=config.finetuning.seed) as run:
        try:
            yield run
        except RequestError:
            if run.is_blank:
                shutil.rmtree(run.path, ignore_errors=True)
            raise


_NUM_EPOCHS, _ALARMS = "finetuning.num_epochs", "finetuning.alarms"


def config_to_resume(run: Path, overrides: Sequence[str]) -> Config:
    """The config of a stored run, with what was changed about it.

    Raises StoreError when it is not what was written, ConfigError when it does not load, RequestError when an
    override would make another run of it.
    """
    bring_back_config(run)
    kept = stored_data(run)
    config = load_config(run / CONFIG, overrides)
    for override in overrides:
        path = _path_of(override)
        # A key in a changeable one, such as an option of a storage's driver, is changeable too.
        slots = (slot_in(config, path[: depth + 1]) for depth in range(len(path)))
        is_changeable = any(slot is not None and CHANGEABLE in slot.metadata for slot in slots)
        is_known = is_changeable or names_secret(config, override)
        if not is_known and dig(kept, path) != MASK:
            key, keys = dotted(path), changeable_keys(config)
            close = nearest(key, keys)
            raise RequestError(
                f"-o {key}: a run goes on as it was begun, and what it has done rests on this setting"
                + (f"; did you mean {close}?" if close else "")
                + f"\nWhat only says how to go on can be changed: {', '.join(keys)}; and secrets can be "
                "given again.\nFor another value start a new run: etude train"
            )
    return config


def storage_options(overrides: Sequence[str]) -> dict[str, Any]:
    """The options of a storage driver among overrides, for a run whose config is in that storage.

    Raises ConfigError for one that does not fit.
    """
    own = [override for override in overrides if _path_of(override)[:2] == ("storage", "options")]
    config = parse_config({"storage": {"address": "file:///"}}, own)
    return {} if config.storage is None else config.storage.driver_options()


def storage_overrides(run: Path, address: str) -> list[str]:
    """The overrides with which a restored run is backed up to where it came from, if its config says else."""
    parent, _ = address_of_run(address)
    storage = stored_data(run).get("storage")
    known = storage.get("address") if isinstance(storage, dict) else storage
    return [] if known == parent else [f"storage.address={parent}"]


def names_secret(config: Config, override: str) -> bool:
    """Whether an override of a config gives it a secret."""
    path, value = _path_of(override), override.partition("=")[2]
    slot = slot_in(config, path)
    is_declared = slot is not None and any(arm.annotation in get_args(Declared) for arm in slot.arms())
    return is_declared or holds_secret(str(path[-1]), value)


def _path_of(override: str) -> KeyPath:
    return tuple(override.partition("=")[0].split("."))


def note_changes(run: RunFolder, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keep changed settings in the run folder; the values before and after of each, by its key.

    With more epochs than before, or other alarms, a finished run becomes an unfinished one. Raises
    RequestError when the run has done more epochs already.
    """
    stored, now = stored_data(run.path), parse_value(resolved_yaml(config))
    keys = [tuple(key.split(".")) for key in changeable_keys(config)]
    changed = {
        dotted(key): (dig(stored, key), dig(now, key)) for key in keys if dig(stored, key) != dig(now, key)
    }
    if _NUM_EPOCHS in changed:
        num_epochs = config.finetuning.num_epochs
        done = max(len(history.epochs) for history in histories(run.journal, run.name).values())
        if num_epochs < done:
            raise RequestError(
                f"-o {_NUM_EPOCHS}={num_epochs}: run {run.name} has done {done} epochs already; "
                f"ask for {done} or more"
            )
    if changed.keys() & {_NUM_EPOCHS, _ALARMS}:
        (run.path / SUMMARY).unlink(missing_ok=True)
    if changed:
        run.write_text(CONFIG, config_text(resolved_yaml(config)), exact=True)
    return changed


def without_changeable(data: dict[str, Any], config: Config) -> dict[str, Any]:
    """A stored config without the settings that may change while it is one run: what makes it that run."""
    changeable = set(changeable_keys(config))

    def kept(value: Any, path: KeyPath) -> Any:
        if not isinstance(value, dict):
            return value
        inside = {key: kept(item, (*path, key)) for key, item in value.items()}
        return {key: item for key, item in inside.items() if dotted((*path, key)) not in changeable}

    return dict(kept(data, ()))


async def retry_failed(run: RunFolder) -> Counter[str] | None:
    """Forget the failures in unfinished epochs that were not the agent's own, by kind.

    None when the run is finished, and there is nothing to be tried again. Raises StoreError.
    """
    if run.read_json(SUMMARY) is not None or run.read_json(RESULT) is not None:
        return None
    return await forget_failures(run.journal, _is_open(run))


def _is_open(run: RunFolder) -> Callable[[str], bool]:
    """Whether the epoch or validation of an episode is not recorded yet, by the episode's id."""
    by_target = histories(run.journal, run.name)
    logs = [EpochLog(run.journal, target) for target in by_target]
    recorded = {
        # A model that rested in an epoch was not trained on its episodes.
        "train": {each.epoch for past in by_target.values() for each in past.epochs if each.resting is None},
        "validation": {each.epoch for past in by_target.values() for each in past.validations},
    }

    def is_open(episode_id: str) -> bool:
        match = _EPOCH.match(episode_id)
        if match is None:
            return True
        phase, epoch = match[1], int(match[2])
        submitted = phase == "train" and any(log.submission(epoch - 1) is not None for log in logs)
        return epoch not in recorded[phase] and not submitted

    return is_open
