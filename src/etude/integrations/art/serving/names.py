"""ART's names for models: `agent@3` after three steps, and `agent` for the newest.

`ServerlessBackend` calls them `wandb-artifact:///ENTITY/PROJECT/agent:step3` and `…/agent`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import sqlalchemy as sa

from etude.server.database import JOBS, table

ART_MODELS = table(
    "art_models",
    sa.Column("project", sa.Text, nullable=False),
    sa.Column("base", sa.Text, nullable=False),
)
"""The models that ART's clients registered, by their names; `base` is the model that they began as."""

ART_STEPS = table(
    "art_steps",
    sa.Column("model", sa.Text, nullable=False, index=True),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("job", sa.Text),
    sa.Column("served", sa.Text),
)
"""`id` is `<model>@<step>`. A step is there when it has a `served` model, or its `job` has made one: it comes
into being with the job's success, and whatever else the job comes to, it was never there."""

_ARTIFACT = re.compile(
    r"wandb-artifact:///[^/]*/(?P<project>[^/]+)/(?P<name>[^/:]+)(:step(?P<step>\d{1,9}))?"
)


@dataclass(frozen=True, slots=True)
class ArtStep:
    """A step of a model that is there."""

    name: str
    """`agent@3`."""
    model: str
    step: int
    served: str
    """The name of the model that answers under it."""
    created: float


def steps_of(connection: sa.Connection, model: str | None = None) -> list[ArtStep]:
    """The steps that are there, of one model or of all, in their order."""
    served = sa.func.coalesce(ART_STEPS.c.served, JOBS.c.fine_tuned_model)
    joined = ART_STEPS.outerjoin(JOBS, ART_STEPS.c.job == JOBS.c.id)
    query = (
        sa.select(ART_STEPS.c.id, ART_STEPS.c.model, ART_STEPS.c.step, served, ART_STEPS.c.created)
        .select_from(joined)
        .where(served.is_not(None))
        .order_by(ART_STEPS.c.model, ART_STEPS.c.step)
    )
    if model is not None:
        query = query.where(ART_STEPS.c.model == model)
    return [ArtStep(*row) for row in connection.execute(query)]


def served_under(connection: sa.Connection, name: str) -> str | None:
    """The model that answers under one of ART's names; None when it is no such name."""
    artifact = _ARTIFACT.fullmatch(name)
    if artifact is not None and not _is_of(connection, artifact["name"], artifact["project"]):
        return None
    name = plain_name(name)
    model = name.partition("@")[0]
    found = steps_of(connection, model)
    if name == model:
        return found[-1].served if found else None
    return next((step.served for step in found if step.name == name), None)


def plain_name(name: str) -> str:
    """`agent@3` or `agent` for any of ART's names; other names as they are."""
    artifact = _ARTIFACT.fullmatch(name)
    if artifact is None:
        return name
    return artifact["name"] if artifact["step"] is None else f"{artifact['name']}@{int(artifact['step'])}"


def art_names(connection: sa.Connection) -> dict[str, ArtStep]:
    """All names, and the steps that they stand for."""
    names: dict[str, ArtStep] = {}
    for step in steps_of(connection):
        names[step.name] = step
        names[step.model] = step
    return names


def _is_of(connection: sa.Connection, model: str, project: str) -> bool:
    query = sa.select(ART_MODELS.c.id).where(ART_MODELS.c.id == model, ART_MODELS.c.project == project)
    return connection.execute(query).first() is not None


def registered(connection: sa.Connection) -> set[str]:
    """The names of the models that were registered."""
    return set(connection.execute(sa.select(ART_MODELS.c.id)).scalars())
