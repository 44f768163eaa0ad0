"""Which episodes of a stored run may be made anew: those that nothing was trained or reported on yet."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from etude.core.history import History
from etude.rewards.rescore import forget_failures
from etude.store.facts import SUMMARY
from etude.store.log import EpochLog, histories
from etude.store.run_folder import RunFolder
from etude.store.stored_config import RESULT

_EPOCH = re.compile(r"(train|validation)/(\d+)(?!\w)")


async def retry_failed(run: RunFolder) -> Counter[str] | None:
    """Forget the failures in unfinished epochs that were not the agent's own, by kind.

    None when the run is finished, and there is nothing to be tried again. Raises StoreError.
    """
    if run.read_json(SUMMARY) is not None or run.read_json(RESULT) is not None:
        return None
    return await forget_failures(run.journal, _is_open(run))


def _is_open(run: RunFolder) -> Callable[[str], bool]:
    """Whether the epoch or validation of an episode is not recorded yet, by the episode's id."""
    targets: list[str | None] = [*histories(run.journal, run.name)] or [None]
    logs = [EpochLog(run.journal, target) for target in targets]
    pasts: list[History] = [log.history(run.name) for log in logs]
    recorded = {
        # A model that rested in an epoch was not trained on its episodes.
        "train": {entry.epoch for past in pasts for entry in past.epochs if entry.resting is None},
        "validation": {entry.epoch for past in pasts for entry in past.validations},
    }

    def is_open(episode_id: str) -> bool:
        match = _EPOCH.match(episode_id)
        if match is None:
            return True
        phase, epoch = match[1], int(match[2])
        submitted = phase == "train" and any(log.submission(epoch - 1) is not None for log in logs)
        return epoch not in recorded[phase] and not submitted

    return is_open
