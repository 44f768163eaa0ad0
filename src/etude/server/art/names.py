"""ART's names for models: `agent@3` after three steps, and `agent` for the newest."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from etude.server.database import ART_MODELS, ART_STEPS, JOBS


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
    model = name.partition("@")[0]
    found = steps_of(connection, model)
    if name == model:
        return found[-1].served if found else None
    return next((step.served for step in found if step.name == name), None)


def art_names(connection: sa.Connection) -> dict[str, ArtStep]:
    """All names, and the steps that they stand for."""
    names: dict[str, ArtStep] = {}
    for step in steps_of(connection):
        names[step.name] = step
        names[step.model] = step
    return names


def registered(connection: sa.Connection) -> set[str]:
    """The names of the models that were registered."""
    return set(connection.execute(sa.select(ART_MODELS.c.id)).scalars())
