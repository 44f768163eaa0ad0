"""How old what is trained on may be: counted in versions that the model has had since."""

from __future__ import annotations

from collections.abc import Sequence

from etude.core.trajectory import EpisodeItem, Trajectory, TrajectoryCollection


def age_of(number: int, made: Sequence[int]) -> int:
    """How many of the versions that were made, by their numbers, are younger than version `number`."""
    return sum(one > number for one in made)


def without_stale(
    collection: TrajectoryCollection, made: Sequence[int], bound: int
) -> tuple[TrajectoryCollection, int]:
    """What was sampled at most `bound` of the versions `made` ago, and how many trajectories were not.

    A trajectory is as old as the oldest of its answers. One that does not tell the version of an answer is
    too old, because nothing bounds its age.
    """
    groups = [[one for one in group if _age(one, made) <= bound] for group in collection.trajectories]
    kept = collection.model_copy(update={"trajectories": [group for group in groups if group]})
    return kept, len(collection) - len(kept)


def _age(trajectory: Trajectory, made: Sequence[int]) -> float:
    sampled = [
        item.model_version for item in trajectory.episode if isinstance(item, EpisodeItem) and item.is_sampled
    ]
    return max((float("inf") if one is None else age_of(one, made) for one in sampled), default=0.0)
