"""What may be changed about a run when it goes on: its length, and what it must not keep."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from etude.config import registry
from etude.config.document import KeyPath, dig, dotted
from etude.config.load import MASK, resolved_yaml
from etude.config.registry import Kind
from etude.config.schema import Config
from etude.config.sections import components_in
from etude.config.slots import slot_at
from etude.core.errors import RequestError
from etude.epochs.log import EpochLog, histories
from etude.store.run_folder import RunFolder
from etude.stored.facts import SUMMARY
from etude.stored.stored_config import CONFIG, stored_data

_NUM_EPOCHS: KeyPath = ("finetuning", "num_epochs")


def check_overrides(run: Path, overrides: Sequence[str]) -> list[str]:
    """The overrides themselves. Raises RequestError when one would make another run of it."""
    data = stored_data(run)
    for override in overrides:
        path: KeyPath = tuple(override.partition("=")[0].split("."))
        if path != _NUM_EPOCHS and not is_secret(data, path):
            raise RequestError(
                f"-o {dotted(path)}: a run goes on as it was begun; only {dotted(_NUM_EPOCHS)} and secrets "
                "may be set. For other settings start a new run: etude train"
            )
    return list(overrides)


def is_secret(data: dict[str, Any], path: KeyPath) -> bool:
    """Whether a key of a stored config holds what is not kept in run folders."""
    if dig(data, path) == MASK:
        return True
    for place, kind in components_in(data):
        if path[: len(place)] == place and len(path) > len(place):
            return _takes_secret(kind, dig(data, place), path[len(place) :])
    return False


def _takes_secret(kind: Kind, component: Any, path: KeyPath) -> bool:
    name = component.get("_type") if isinstance(component, dict) else None
    if name not in registry.names(kind):
        return False
    slot = slot_at(registry.lookup(kind, name).config_type, path)
    return slot is not None and any(arm.annotation is SecretStr for arm in slot.arms())


def note_more_epochs(run: RunFolder, config: Config) -> None:
    """Keep a raised number of epochs in the run folder, where a finished run becomes an unfinished one.

    Raises RequestError when the run has done more epochs already.
    """
    stored, wanted = stored_data(run.path), config.finetuning.num_epochs
    if dig(stored, _NUM_EPOCHS) == wanted:
        return
    past = [*histories(run.journal, run.name).values()] or [EpochLog(run.journal).history(run.name)]
    done = max(len(history.epochs) for history in past)
    if wanted < done:
        raise RequestError(
            f"-o {dotted(_NUM_EPOCHS)}={wanted}: run {run.name} has done {done} epochs already; "
            f"`etude export {run.path} --version v{wanted}` gives the weights of an earlier one"
        )
    run.write_text(CONFIG, resolved_yaml(config))
    (run.path / SUMMARY).unlink(missing_ok=True)
