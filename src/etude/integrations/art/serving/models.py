"""The models that ART's clients train here, the steps of each, and ART's names for them.

`agent@3` is a model after three steps, and `agent` the newest. `ServerlessBackend` calls them
`wandb-artifact:///ENTITY/PROJECT/agent:step3` and `…/agent`.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from etude.integrations.art.serving.bodies import ArtModel
from etude.server.database import JOBS, Row, new_id, table
from etude.server.jobs import FINAL
from etude.server.models import Alias, ModelStore
from etude.wire.http_server import ApiError

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


def plain_name(name: str) -> str:
    """`agent@3` or `agent` for any of ART's names; other names as they are."""
    artifact = _ARTIFACT.fullmatch(name)
    if artifact is None:
        return name
    return artifact["name"] if artifact["step"] is None else f"{artifact['name']}@{int(artifact['step'])}"


class ArtNames:
    """ART's names, as the server looks them up."""

    def aliases(self, connection: sa.Connection) -> dict[str, Alias]:
        """All names, and the models of the steps that they stand for."""
        names: dict[str, Alias] = {}
        for step in steps_of(connection):
            names[step.name] = names[step.model] = Alias(step.served, step.created)
        return names

    def served_under(self, connection: sa.Connection, name: str) -> str | None:
        """The model that answers under one of ART's names; None when it is no such name."""
        artifact = _ARTIFACT.fullmatch(name)
        if artifact is not None and not _is_of(connection, artifact["name"], artifact["project"]):
            return None
        name = plain_name(name)
        model = name.partition("@")[0]
        steps = steps_of(connection, model)
        if name == model:
            return steps[-1].served if steps else None
        return next((step.served for step in steps if step.name == name), None)


def _is_of(connection: sa.Connection, model: str, project: str) -> bool:
    query = sa.select(ART_MODELS.c.id).where(ART_MODELS.c.id == model, ART_MODELS.c.project == project)
    return connection.execute(query).first() is not None


def registered(connection: sa.Connection) -> set[str]:
    """The names of the models that were registered."""
    return set(connection.execute(sa.select(ART_MODELS.c.id)).scalars())


@dataclass(frozen=True, slots=True)
class Begun:
    """A training that makes the next step: a new job, or one that is under way with the same data."""

    step: int
    start: ArtStep
    job: str
    is_new: bool


class ArtModels:
    """The registered models and their steps. Only one server at a time writes here."""

    def __init__(self, engine: sa.Engine, models: ModelStore, source: str) -> None:
        """`source` is where the server's own model was loaded from: clients may call it by that too."""
        self._engine = engine
        self._models = models
        self._source = source
        with engine.connect() as connection:
            self._names = registered(connection)

    def tells_tokens(self, name: str) -> bool:
        """Whether a name is ART's: its clients get tokens and logprobs without asking."""
        return plain_name(name).partition("@")[0] in self._names

    def register(self, model: ArtModel) -> None:
        """Take a model in, at step 0. One that is known stays as it is.

        Raises ApiError: 400 when it is not to be trained from a model of this server, 409 when another
        project has its name.
        """
        base = self._base_of(model)
        known = self._row(model.name) or self._add(model, base)
        self._check_same(known, model)
        if known["base"] != base:
            raise ApiError(
                409, f"'{model.name}' was registered with base_model '{known['base']}'", param="base_model"
            )

    def named(self, name: str) -> ArtModel:
        """A model by its name alone. Raises ApiError 404."""
        row = self._row(name)
        if row is None:
            raise _unknown(name)
        return ArtModel(name=name, project=row["project"], trainable=True, base_model=row["base"])

    def base_of(self, model: ArtModel) -> str:
        """The model that it began as. Raises ApiError as `newest`."""
        return str(self._known(model)["base"])

    def newest(self, model: ArtModel) -> ArtStep:
        """Its last step. Raises ApiError: 404 for a model that was not registered, 409 for another's."""
        self._known(model)
        return self.steps(model.name)[-1]

    def steps(self, name: str) -> list[ArtStep]:
        """The steps that are there, in their order."""
        with self._engine.connect() as connection:
            return steps_of(connection, name)

    def begin(self, model: ArtModel, request_hash: str) -> Begun:
        """The job of the next step, whose row is made here and whose job is to be made under that name.

        Raises ApiError 409 while the model is trained on other data.
        """
        newest = self.newest(model)
        live = self._live(newest)
        if live is None:
            job = new_id("ftjob")
            self._put(_step(model.name, newest.step + 1, job=job))
            return Begun(newest.step + 1, newest, job, is_new=True)
        if live["request_hash"] != request_hash:
            raise _busy(live)
        return Begun(newest.step + 1, newest, live["job"], is_new=False)

    def skip(self, model: ArtModel) -> ArtStep:
        """Go on to the next step with the weights of the last one, as ART does where nothing is to learn.

        Raises ApiError 409 while the model is trained.
        """
        newest = self.newest(model)
        live = self._live(newest)
        if live is not None:
            raise _busy(live)
        self._put(_step(model.name, newest.step + 1, served=newest.served))
        return self.newest(model)

    def keep(self, model: ArtModel, steps: set[int]) -> list[str]:
        """Forget all other steps but the last; gives the models that no step stands for any more."""
        last = self.newest(model)
        dropped = [step for step in self.steps(model.name) if step.step not in steps | {last.step}]
        with self._engine.begin() as connection:
            connection.execute(
                sa.delete(ART_STEPS).where(ART_STEPS.c.id.in_([step.name for step in dropped]))
            )
            return self._unused(connection, {step.served for step in dropped})

    def delete(self, model: ArtModel) -> list[str]:
        """Forget a model; gives the models that no step stands for any more. Raises ApiError as `skip`."""
        live = self._live(self.newest(model))
        if live is not None:
            raise _busy(live)
        served = {step.served for step in self.steps(model.name)}
        with self._engine.begin() as connection:
            connection.execute(sa.delete(ART_STEPS).where(ART_STEPS.c.model == model.name))
            connection.execute(sa.delete(ART_MODELS).where(ART_MODELS.c.id == model.name))
            unused = self._unused(connection, served)
        self._names.discard(model.name)
        return unused

    def _unused(self, connection: sa.Connection, served: set[str]) -> list[str]:
        """Those of the models that are neither a step nor a base of what is registered, nor the server's."""
        bases = set(connection.execute(sa.select(ART_MODELS.c.base)).scalars())
        still = {step.served for step in steps_of(connection)} | bases | {self._models.base.name}
        return sorted(served - still)

    def _live(self, newest: ArtStep) -> Row | None:
        """The step and its job that are under way, if any are."""
        query = (
            sa.select(ART_STEPS.c.model, ART_STEPS.c.job, JOBS.c.request_hash)
            .join_from(ART_STEPS, JOBS, ART_STEPS.c.job == JOBS.c.id)
            .where(ART_STEPS.c.model == newest.model, ART_STEPS.c.step > newest.step)
            .where(JOBS.c.status.not_in(FINAL))
        )
        with self._engine.connect() as connection:
            row = connection.execute(query).mappings().first()
        return None if row is None else dict(row)

    def _put(self, row: Row) -> None:
        """In the place of a step that never came to be."""
        with self._engine.begin() as connection:
            connection.execute(sa.delete(ART_STEPS).where(ART_STEPS.c.id == row["id"]))
            connection.execute(sa.insert(ART_STEPS).values(row))

    def _add(self, model: ArtModel, base: str) -> Row:
        if any(model.name == known.name for known in self._models.all()):
            raise ApiError(409, f"'{model.name}' is the name of another model here", param="name")
        row: Row = {"id": model.name, "created": time.time(), "project": model.project, "base": base}
        with self._engine.begin() as connection:
            connection.execute(sa.insert(ART_MODELS).values(row))
            connection.execute(sa.insert(ART_STEPS).values(_step(model.name, 0, served=base)))
        self._names.add(model.name)
        return row

    def _known(self, model: ArtModel) -> Row:
        row = self._row(model.name)
        if row is None:
            raise _unknown(model.name)
        self._check_same(row, model)
        return row

    def _row(self, name: str) -> Row | None:
        with self._engine.connect() as connection:
            row = connection.execute(sa.select(ART_MODELS).where(ART_MODELS.c.id == name)).mappings().first()
        return None if row is None else dict(row)

    def _check_same(self, row: Row, model: ArtModel) -> None:
        if row["project"] != model.project:
            raise ApiError(
                409,
                f"project '{row['project']}' has a model '{model.name}' here, and names are the server's; "
                "choose another name",
                param="name",
            )

    def _base_of(self, model: ArtModel) -> str:
        asked, own = model.base_model, self._models.base.name
        if asked in (own, self._source):
            return own
        try:
            return self._models.get(asked or "").name
        except ApiError as error:
            message = (
                f"this server trains '{own}', and models made of it; give that as base_model, not '{asked}'"
            )
            raise ApiError(400, message, param="base_model", code="model_not_found") from error


def _unknown(name: str) -> ApiError:
    message = f"there is no model '{name}'; register it first (`await model.register(backend)`)"
    return ApiError(404, message, param="name", code="model_not_found")


def _busy(live: Row) -> ApiError:
    message = f"'{live['model']}' is being trained by job {live['job']}; wait for it, or cancel it"
    return ApiError(409, message, code="model_busy")


def _step(model: str, step: int, **facts: Any) -> Row:
    name = f"{model}@{step}"
    return {"id": name, "created": time.time(), "model": model, "step": step, **facts}
