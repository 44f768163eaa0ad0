"""Versions that are not on the disk, trained again in a copy of their run, on the episodes in its journal."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.backup.copies import copy_journal, listing
from etude.core.errors import EtudeError
from etude.core.interfaces import Progress
from etude.loop.lifecycle import config_to_resume
from etude.store.database import DATABASE
from etude.store.facts import histories_of
from etude.store.files import private_folder
from etude.store.run_folder import RunFolder
from etude.store.versions import RunVersion, choose_version
from etude.verbs import train_in


@contextmanager
def at_hand(run: Path, wish: str, say: Callable[[str], None]) -> Iterator[RunVersion]:
    """The version that is wished for, as `choose_version` chooses; it is on the disk within the block.

    One that is not there is trained again from the last one before it that is, in a copy of the run. Raises
    RequestError where there is no such version, and what resuming the run raises.
    """
    wanted = choose_version(run, wish, kept=False)
    if wanted.folder is None or wanted.folder.exists():
        yield wanted
        return
    say(f"{wanted} is not on the disk: it is trained again, on the episodes that are in the journal")
    with tempfile.TemporaryDirectory(suffix=".part", dir=private_folder(run / "export")) as root:
        copy = Path(root) / run.name
        epoch = _copy_until(wanted, copy)
        asyncio.run(_train(copy, _Until(epoch)))
        made = choose_version(copy, str(wanted).removeprefix(f"{run.name}:"))
        if made.version and wanted.version and made.version.digest != wanted.version.digest:
            say("its weights are not those of the first time, bit for bit: the run is not deterministic")
        yield replace(made, choice=wanted.choice)


def _copy_until(wanted: RunVersion, copy: Path) -> int:
    """Copy the run without the versions that were made after the wanted one; the epoch that made that."""
    run, histories = wanted.run, histories_of(wanted.run)
    last = next((each.epoch for each in histories[wanted.target].epochs if each.version == wanted.version), 0)
    later = [
        RunVersion(run, entry.version).folder
        for history in histories.values()
        for entry in history.trained
        if entry.epoch > last
    ]
    for name in listing(run):
        source, target = run / name, copy / name
        if name.startswith("export/") or any(folder in later for folder in source.parents):
            continue
        private_folder(target.parent)
        if name.startswith("checkpoints/"):
            # Nobody writes into a version: there is no need for its bytes twice.
            with suppress(OSError):
                os.link(source, target)
                continue
        shutil.copy2(source, target)
    copy_journal(run, private_folder(copy) / DATABASE)
    return last


async def _train(run: Path, progress: Progress) -> None:
    """Go on with the copy of a run, which nobody is to hear of."""
    unheard: dict[str, Any] = {"report": [], "storage": None, "metrics": None, "budget": None}
    config = config_to_resume(run, ()).model_copy(update=unheard)
    with RunFolder.open(run) as folder, suppress(_Reached):
        await train_in(config, folder, progress=progress)


class _Reached(EtudeError):
    """The version is there."""


@dataclass(frozen=True)
class _Until(Progress):
    """Ends a run after an epoch, whose version its adapter then writes."""

    last: int

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """Raises what ends the run, once the last epoch is over."""
        if epoch > self.last:
            raise _Reached
