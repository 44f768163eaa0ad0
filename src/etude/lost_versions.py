"""Lost or damaged versions, trained again in a copy of their run from the episodes in its journal."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError
from etude.core.interfaces import Progress
from etude.core.threads import run_loop
from etude.loop.lifecycle import config_to_resume
from etude.store.backup import copy_journal, list_run_files
from etude.store.database import DATABASE
from etude.store.facts import RunVersion, choose_version
from etude.store.files import WEIGHTS_FILE, damage_in, private_folder
from etude.store.histories import read_histories
from etude.store.run_folder import RunFolder
from etude.verbs import train_in


@contextmanager
def version_on_disk(run: Path, wish: str, say: Callable[[str], None]) -> Iterator[RunVersion]:
    """Yield the version that `wish` names for `choose_version`, with its weights on disk within the block. If
    they are missing or damaged, a copy of the run trains them again. Raises RequestError and the errors of
    resuming."""
    wanted = choose_version(run, wish, kept=False)
    damage = [] if wanted.folder is None else damage_in(wanted.folder, only=WEIGHTS_FILE)
    if not damage:
        yield wanted
        return
    say(f"{wanted}: {damage[0]}; it is trained again, on the episodes that are in the journal")
    draft_suffix = f".{os.getpid()}.part"  # A draft's name, so that it is deleted after a kill.
    with tempfile.TemporaryDirectory(draft_suffix, ".", private_folder(run / "export")) as root:
        copy = Path(root) / run.name
        progress = _Until(_copy_until(wanted, copy))
        # Without its trackers, backup and budget.
        unheard: dict[str, Any] = {"report": [], "storage": None, "budget": None}
        with RunFolder.open(copy) as opened, suppress(_Reached):
            config = config_to_resume(copy, ()).model_copy(update=unheard)
            run_loop(train_in(config, opened, progress=progress))
        retrained = choose_version(copy, str(wanted).removeprefix(f"{run.name}:"))
        if retrained.version and wanted.version and retrained.version.digest != wanted.version.digest:
            say("its weights differ from the first time: the run is not deterministic")
        yield replace(retrained, choice=wanted.choice)


def _copy_until(wanted: RunVersion, copy: Path) -> int:
    """Copy the run without the versions made after `wanted`, and return the epoch that made it."""
    run, histories = wanted.run, read_histories(wanted.run)
    last = next((each.epoch for each in histories[wanted.target].epochs if each.version == wanted.version), 0)
    later = [
        RunVersion(run, entry.version).folder
        for history in histories.values()
        for entry in history.trained_epochs
        if entry.epoch > last
    ]
    for name in list_run_files(run):
        source, target = run / name, copy / name
        if name.startswith("export/") or any(folder in later for folder in source.parents):
            continue
        private_folder(target.parent)
        if name.startswith("checkpoints/"):
            # Nobody writes into a version, so a hard link replaces a second copy of its bytes.
            with suppress(OSError):
                os.link(source, target)
                continue
        shutil.copy2(source, target)
    copy_journal(run, private_folder(copy) / DATABASE)
    return last


class _Reached(EtudeError):
    """The signal that the wanted version has been trained."""


@dataclass(frozen=True)
class _Until(Progress):
    """A Progress that ends a run after the epoch `last`. The adapter then writes that epoch's version."""

    last: int

    def epoch_started(self, epoch: int, num_epochs: int) -> None:
        """Raise _Reached once the epoch `last` is over."""
        if epoch > self.last:
            raise _Reached
