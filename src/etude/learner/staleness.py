"""A hard bound on how old the weights may be that sampled what is trained on."""

from __future__ import annotations

from etude.core.errors import TrainingError
from etude.core.trajectory import EpisodeItem, EpisodeItemRole, Trajectory, TrajectoryCollection


def without_stale(
    collection: TrajectoryCollection, version: int, bound: int
) -> tuple[TrajectoryCollection, int]:
    """What was sampled at most `bound` versions before `version`, and how many trajectories were not.

    A trajectory is as old as the oldest of its answers. One that does not tell the version of an answer is
    too old, because nothing bounds its age. Raises TrainingError when nothing is left.
    """
    groups = [[one for one in group if _age(one, version) <= bound] for group in collection.trajectories]
    kept = collection.model_copy(update={"trajectories": [group for group in groups if group]})
    if len(collection) and not len(kept):
        youngest = min(_age(one, version) for group in collection.trajectories for one in group)
        told = "do not say" if youngest == float("inf") else f"were at least {youngest:.0f} updates ago"
        raise TrainingError(
            f"all {len(collection)} trajectories are too old: max_staleness is {bound}, and the weights that "
            f"sampled them {told}; sample anew, or raise it"
        )
    return kept, len(collection) - len(kept)


def _age(trajectory: Trajectory, version: int) -> float:
    sampled = [
        (item.metadata or {}).get("model_version")
        for item in trajectory.episode
        if isinstance(item, EpisodeItem)
        and item.role is EpisodeItemRole.ASSISTANT
        and not (item.metadata or {}).get("given")
    ]
    return max((float("inf") if one is None else version - int(one) for one in sampled), default=0.0)
