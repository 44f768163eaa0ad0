"""The processes that train a job on a cluster, as the one that starts them tells in a file of its folder."""

from __future__ import annotations

import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from etude.store.files import write_atomically
from etude.store.lock import locked_by

LEARNERS = "learners"
"""The folder in a run folder where a cluster's nodes train, with their log."""
TEAM, LOCK = "team.json", "lock"


class Team(BaseModel):
    """The processes of a job that trains now."""

    model_config = ConfigDict(frozen=True)

    wanted: int
    """Processes that the job was asked for."""
    nodes: tuple[str, ...]
    """The address of the node of each; none while the cluster has no room for them."""
    since: float
    """When this became so; Unix seconds."""


def tell_team(folder: Path, wanted: int, nodes: tuple[str, ...] = ()) -> None:
    """Write down where the processes of a job are. Raises StoreError."""
    write_atomically(folder / TEAM, Team(wanted=wanted, nodes=nodes, since=time.time()).model_dump_json())


def teams_of(run: Path) -> list[Team]:
    """The teams that train for a run now; the file of one that has ended, however it did, is not counted."""
    teams, folder = list[Team](), run / LEARNERS
    for path in sorted((*folder.glob(TEAM), *folder.glob(f"*/{TEAM}"))):
        try:
            if locked_by(path.parent / LOCK) is not None:
                teams.append(Team.model_validate_json(path.read_text(encoding="utf-8")))
        except (OSError, ValidationError):
            continue  # It has just ended, or another version wrote it.
    return teams
