"""The checks of a job's data before the job is made.

They ensure that the right weights sampled the data, and that target functions made calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain

from etude.algorithms.algorithm import data_kind
from etude.algorithms.samples import EVERY_FUNCTION, is_targeted
from etude.core.conversion import TrainingUnit, TrajectoryCollection
from etude.core.episode import SIMULATED_USER, EpisodeRecord
from etude.core.errors import RequestError, TrainingError, nearest
from etude.core.job import ModelVersion
from etude.core.trajectory import EpisodeItem, Trajectory


class Provenance:
    """Knows which weights sampled the latest episodes, and checks that a job's data comes from them."""

    def __init__(self, model: str) -> None:
        """`model` is the trained entry of `llms`."""
        self._model = model
        self._latest: tuple[int, int] | None = None
        """The last epoch that had answers, and the newest version that sampled them."""

    def saw(self, epoch: int, episode: EpisodeRecord) -> None:
        """Remember the newest version that answered in an epoch's episode."""
        for call in episode.calls:
            if call.completion is not None and call.model == self._model and not call.logged:
                answered = (epoch, call.completion.model_version)
                self._latest = max(answered, self._latest or answered)

    def check(
        self,
        collection: TrajectoryCollection,
        calls: Mapping[int, int],
        now: ModelVersion | None,
        made: Sequence[int],
        bound: int,
        epoch: int,
    ) -> None:
        """Raise TrainingError if the epoch's data comes from weights over `bound` updates before `now`.

        `calls` counts the epoch's calls of the model by version. `made` has the versions that epochs made. If
        the backend does not tell its versions (`now` is None), nothing is checked.
        """
        if now is None:
            return
        young = {now.number, *(0, *made)[-1 - bound :]}
        if old := {number: count for number, count in calls.items() if number not in young}:
            listed = ", ".join(f"{count} from version {number}" for number, count in sorted(old.items()))
            is_ahead = any(number in (0, *made) for number in old)
            advice = "; were they collected with 'finetuning.collect_ahead'? Then keep it on"
            raise TrainingError(
                f"episodes of epoch {epoch + 1} were not sampled from version {now.number}, which the model "
                f"was at: {listed} of {sum(calls.values())} calls{advice if is_ahead else ''}"
            )
        if data_kind(collection.method) != "samples":
            return
        latest = None if self._latest is None else self._latest[1]
        if latest is not None and latest not in young:
            raise TrainingError(
                f"no episode was sampled from version {now.number}, which the model is at: the data of epoch "
                f"{epoch + 1} can only be those of version {latest} or older. Collect in every epoch: "
                "`await self.run_eval()` plays new episodes each time it is called"
            )
        sources = chain.from_iterable(map(_versions, chain.from_iterable(collection.groups)))
        if stale := Counter(version for version in sources if version is not None and version not in young):
            listed = ", ".join(f"{count} of version {number}" for number, count in sorted(stale.items()))
            raise TrainingError(
                f"trajectories of epoch {epoch + 1} hold answers that older weights sampled, where the model "
                f"is at version {now.number}: {listed}. Build them from the episodes that `run_eval` or "
                "`runtime.evaluation.run` returned in this epoch"
            )


def _versions(unit: TrainingUnit) -> list[int | None]:
    """Return the versions that sampled a unit's answers; None for unknown ones."""
    if isinstance(unit, Trajectory):
        return [item.model_version for item in unit.episode if isinstance(item, EpisodeItem)]
    return [turn.model_version for sample in unit.samples for turn in sample.turns]


class TargetWatch:
    """Checks the episodes of the first epoch for calls by the target functions to the trained model."""

    def __init__(
        self, functions: Collection[str], model: str, warn: Callable[[str], None], target: str | None = None
    ) -> None:
        """`target` is the name of the model, if several are trained."""
        self._functions = functions
        self._model = model
        self._warn = warn
        self._key = f"finetuning.{f'targets.{target}.' if target else ''}target_functions"
        self._callers: set[str] = set()
        self._episodes = 0
        """The number of episodes with calls."""
        self._is_targeted = False
        self._is_over = False

    def saw(self, episode: EpisodeRecord) -> None:
        """Check an episode."""
        answered = [call for call in episode.calls if call.completion is not None]
        self._episodes += bool(answered)
        self._callers |= {call.function for call in answered if call.model == self._model} - {SIMULATED_USER}
        self._is_targeted |= any(is_targeted(call, self._functions, self._model) for call in answered)

    def epoch_over(self, *, is_empty: bool) -> None:
        """Raise RequestError if the epoch had no targeted call, and nothing was trained on (`is_empty`).

        A custom builder may train on other calls. Warns once of target functions that made no call.
        """
        if self._is_over or not self._episodes:
            return
        self._is_over = True
        callers = ", ".join(f"'{name}'" for name in sorted(self._callers)) or "none"
        if is_empty and not self._is_targeted:
            meant = filter(None, (nearest(name, self._callers) for name in self._functions))
            names = ", ".join(dict.fromkeys(meant))
            advice = f"Did you mean '{self._key}: [{names}]'?" if names else f"Name some in '{self._key}'."
            raise RequestError(
                f"none of the {self._episodes} episodes has a call to '{self._model}' by a target function "
                f"({', '.join(self._functions)}); functions that called it: {callers}"
                f". {advice if self._callers else 'Nothing could be trained on'}"
            )
        missing = [name for name in self._functions if name not in {EVERY_FUNCTION, *self._callers}]
        if missing and self._is_targeted:
            unused = f"'{self._key}' names {', '.join(missing)}, which never called '{self._model}'"
            self._warn(f"{unused} in {self._episodes} episodes; functions that called it: {callers}")
