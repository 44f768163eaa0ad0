"""Provenance: whether training data was sampled from the weights that it is said to come from."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from etude.algorithms.algorithm import kind_of
from etude.core.episode import EpisodeRecord
from etude.core.errors import TrainingError
from etude.core.job import ModelVersion
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, TrajectoryCollection
from etude.loop.staleness import age_of

_REMEMBERED = 100_000
"""Answers whose weights are remembered, the latest: 10 MB or so."""


class Provenance:
    """Remembers which weights sampled the episodes that were handed out, whoever asked for them.

    Every collection goes through `check` before it is submitted, so that it holds for every builder and
    every trainer.
    """

    def __init__(self, model: str) -> None:
        """`model` is the entry of `llms` that is trained."""
        self._model = model
        self._versions: OrderedDict[int, int] = OrderedDict()
        self._latest: int | None = None

    def saw(self, episode: EpisodeRecord) -> None:
        """Remember the answers of an episode."""
        for call in episode.calls:
            if call.completion is None or call.model != self._model:
                continue
            version = call.completion.model_version
            self._latest = version if self._latest is None else max(version, self._latest)
            if (print_ := _fingerprint(call.completion.logprobs)) is not None:
                self._versions[print_] = max(version, self._versions.pop(print_, version))
        while len(self._versions) > _REMEMBERED:
            self._versions.popitem(last=False)

    def check(
        self,
        collection: TrajectoryCollection,
        calls: Mapping[int, int],
        now: ModelVersion | None,
        made: Sequence[int],
        bound: int,
        epoch: int,
    ) -> None:
        """Raise TrainingError unless the epoch's data are of weights at most `bound` updates before `now`.

        `calls` counts the epoch's calls of the model by version, and `made` are the versions that epochs
        have made. Nothing is known where the backend does not say what its versions are (`now` is None).
        """
        if now is None:
            return
        young = {now.number} | {number for number in (0, *made) if age_of(number, made) <= bound}
        if old := {number: count for number, count in calls.items() if number not in young}:
            listed = ", ".join(f"{count} from version {number}" for number, count in sorted(old.items()))
            raise TrainingError(
                f"episodes of epoch {epoch + 1} were not sampled from version {now.number}, which the model "
                f"was at: {listed} of {sum(calls.values())} calls{_advice(old, made)}"
            )
        if kind_of(collection.method) != "samples":
            return
        if self._latest is not None and self._latest not in young:
            raise TrainingError(
                f"no episode was sampled from version {now.number}, which the model is at: the data of epoch "
                f"{epoch + 1} can only be those of version {self._latest} or older. Collect in every epoch: "
                "`await self.run_eval()` plays new episodes each time it is called"
            )
        stale = Counter(version for version in self._sources(collection) if version not in young)
        if stale:
            listed = ", ".join(f"{count} of version {number}" for number, count in sorted(stale.items()))
            raise TrainingError(
                f"trajectories of epoch {epoch + 1} hold answers that older weights sampled, where the model "
                f"is at version {now.number}: {listed}. Build them from the episodes that `run_eval` or "
                "`runtime.evaluation.run` returned in this epoch"
            )

    def _sources(self, collection: TrajectoryCollection) -> Iterator[int]:
        """The versions of the answers that are trained on, as far as they are known."""
        for trajectory in (one for group in collection.trajectories for one in group):
            for item in trajectory.episode:
                if isinstance(item, EpisodeItem) and item.role is EpisodeItemRole.ASSISTANT:
                    version = self._versions.get(_fingerprint(item.logprobs) or 0)
                    if version is not None:
                        yield version


def _fingerprint(logprobs: Any) -> int | None:
    """A hash of an answer's logprobs, which two samples of different weights do not share.

    None for another kind of object, or for none.
    """
    if not isinstance(logprobs, list | tuple) or not logprobs:
        return None
    return hash(tuple(logprobs)) if all(isinstance(value, float) for value in logprobs) else None


def _advice(versions: Collection[int], made: Sequence[int]) -> str:
    """What to do where the data are those of a run that collected ahead."""
    if any(number in (0, *made) for number in versions):
        return "; were they collected with 'finetuning.collect_ahead'? Then go on with it"
    return ""
