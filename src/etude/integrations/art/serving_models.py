"""The models that ART's clients train on this server, their steps, and ART's names for them.

`agent@3` is a model after three steps, and `agent` is its newest step. `ServerlessBackend` calls them
`wandb-artifact:///ENTITY/PROJECT/agent:step3` and `…/agent`.
"""

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from pydantic import BaseModel, FiniteFloat

from etude.core.call import ChatRequest
from etude.core.errors import EngineError, RequestError
from etude.core.message import Message
from etude.core.training_rows import GrpoRow, GrpoTrajectory, GrpoTurn
from etude.integrations.art.wire import ArtGroup, ArtHistory
from etude.models.text_codec import TextCodec
from etude.server.database import JOBS, Row, fetch_row, new_id, table
from etude.server.jobs import FINAL
from etude.server.models import Alias, ModelStore
from etude.wire.bodies import check_conversation
from etude.wire.http_server import ApiError
from etude.wire.sampling import validated

ART_MODELS = table(
    "art_models", sa.Column("project", sa.Text, nullable=False), sa.Column("base", sa.Text, nullable=False)
)
"""The models that ART's clients registered, by name. `base` is the model that they were trained from."""

ART_STEPS = table(
    "art_steps",
    sa.Column("model", sa.Text, nullable=False, index=True),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("job", sa.Text),
    sa.Column("served", sa.Text),
)
"""The steps of models; `id` is `<model>@<step>`. A step exists if it has a `served` model or its `job` has
made one. So a step appears when its job succeeds, and a failed job leaves none."""

_ARTIFACT = re.compile(r"wandb-artifact:///[^/]*/[^/]+/(?P<name>[^/:]+)(:step(?P<step>\d{1,9}))?")


@dataclass(frozen=True, slots=True)
class ArtStep:
    """An existing step of a model."""

    name: str
    """The name of the step, such as `agent@3`."""
    model: str
    step: int
    served: str
    """The name of the server's model that answers for this step."""
    created: float


def find_steps(connection: sa.Connection, model: str | None = None) -> list[ArtStep]:
    """Return the existing steps of one model or of all models, in order."""
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
    """Return `agent@3` or `agent` for any form of ART's names, and other names unchanged."""
    artifact = _ARTIFACT.fullmatch(name)
    if artifact is None:
        return name
    return artifact["name"] if artifact["step"] is None else f"{artifact['name']}@{int(artifact['step'])}"


class ArtNames:
    """ART's names, for the server's lookup."""

    def aliases(self, connection: sa.Connection) -> dict[str, Alias]:
        """Return all names, with the served model of each."""
        names: dict[str, Alias] = {}
        for step in find_steps(connection):
            names[step.name] = names[step.model] = Alias(step.served, step.created)
        return names

    def served_under(self, connection: sa.Connection, name: str) -> str | None:
        """Return the model that answers for one of ART's names; None if the name is not ART's."""
        name = plain_name(name)
        model = name.partition("@")[0]
        steps = find_steps(connection, model)
        if name == model:
            return steps[-1].served if steps else None
        return next((step.served for step in steps if step.name == name), None)


class ArtModels:
    """The registered models and their steps. Only one server at a time writes them."""

    def __init__(self, engine: sa.Engine, models: ModelStore, source: str) -> None:
        """Open the store. `source` is the origin of the server's base model, another name for it."""
        self._engine = engine
        self._models = models
        self._source = source
        with engine.connect() as connection:
            self._names = set(connection.execute(sa.select(ART_MODELS.c.id)).scalars())

    def tells_tokens(self, name: str) -> bool:
        """Return whether a name is ART's. Its clients get token ids and logprobs without asking."""
        return plain_name(name).partition("@")[0] in self._names

    def register(self, name: str, project: str, base_model: str) -> None:
        """Register a model at step 0. A registered model stays as it is.

        Raises ApiError: 404 if `base_model` is not a model of this server, 409 if another model has the name.
        """
        base = self._models.base.name if base_model == self._source else self._models.get(base_model).name
        known = fetch_row(self._engine, ART_MODELS, ART_MODELS.c.id == name) or self._add(name, project, base)
        if (known["project"], known["base"]) != (project, base):
            raise ApiError(
                409,
                f"'{name}' is registered here in project '{known['project']}' with base_model "
                f"'{known['base']}', and a name is unique at a server; choose another",
                param="name",
            )

    def steps(self, name: str) -> list[ArtStep]:
        """Return the existing steps, in order. Raises ApiError 404 if the model is not registered."""
        with self._engine.connect() as connection:
            steps = find_steps(connection, name)
        if not steps:
            message = f"there is no model '{name}'; register it first (`await model.register(backend)`)"
            raise ApiError(404, message, param="name", code="model_not_found")
        return steps

    def begin(self, name: str, request_hash: str) -> tuple[ArtStep, str, bool]:
        """Return the last step, the next step's job, and whether the job is new. Add the row of a new job.

        Raises ApiError 409 while the model is trained on other data.
        """
        newest, live = self._newest_and_job(name, request_hash)
        job = live or new_id("ftjob")
        if live is None:
            self._put(name, newest.step + 1, job=job)
        return newest, job, live is None

    def skip(self, name: str) -> ArtStep:
        """Add a step with the weights of the last one, as ART does when there is nothing to learn.

        Raises ApiError 409 while the model is trained.
        """
        newest, _ = self._newest_and_job(name)
        self._put(name, newest.step + 1, served=newest.served)
        return self.steps(name)[-1]

    def drop(self, name: str, numbers: set[int]) -> list[str]:
        """Delete some steps. Return the served models that no step uses any more."""
        dropped = [step for step in self.steps(name) if step.step in numbers]
        with self._engine.begin() as connection:
            connection.execute(
                sa.delete(ART_STEPS).where(ART_STEPS.c.id.in_([step.name for step in dropped]))
            )
            return self._unused(connection, {step.served for step in dropped})

    def delete(self, name: str) -> list[str]:
        """Delete a model. Return the served models that no step uses any more.

        Raises ApiError 409 while the model is trained.
        """
        self._newest_and_job(name)
        served = {step.served for step in self.steps(name)}
        with self._engine.begin() as connection:
            connection.execute(sa.delete(ART_STEPS).where(ART_STEPS.c.model == name))
            connection.execute(sa.delete(ART_MODELS).where(ART_MODELS.c.id == name))
            unused = self._unused(connection, served)
        self._names.discard(name)
        return unused

    def _unused(self, connection: sa.Connection, served: set[str]) -> list[str]:
        """Return the models in `served` that neither a step, a registered model nor the server needs."""
        bases = set(connection.execute(sa.select(ART_MODELS.c.base)).scalars())
        still = {step.served for step in find_steps(connection)} | bases | {self._models.base.name}
        return sorted(served - still)

    def _newest_and_job(self, name: str, request_hash: str = "") -> tuple[ArtStep, str | None]:
        """Return the last step, and the unfinished job of the next step if there is one.

        Raises ApiError 409 if that job belongs to another request.
        """
        newest = self.steps(name)[-1]
        query = (
            sa.select(ART_STEPS.c.job, JOBS.c.request_hash)
            .join_from(ART_STEPS, JOBS, ART_STEPS.c.job == JOBS.c.id)
            .where(ART_STEPS.c.model == name, ART_STEPS.c.step > newest.step)
            .where(JOBS.c.status.not_in(FINAL))
        )
        with self._engine.connect() as connection:
            live = connection.execute(query).first()
        if live is not None and live.request_hash != request_hash:
            message = f"'{name}' is being trained by job {live.job}; wait for it, or cancel it"
            raise ApiError(409, message, code="model_busy")
        return newest, None if live is None else live.job

    def _put(self, model: str, step: int, **facts: Any) -> None:
        """Add a step. It replaces the row of a step whose job failed."""
        row = {"id": f"{model}@{step}", "created": time.time(), "model": model, "step": step, **facts}
        with self._engine.begin() as connection:
            connection.execute(sa.delete(ART_STEPS).where(ART_STEPS.c.id == row["id"]))
            connection.execute(sa.insert(ART_STEPS).values(row))

    def _add(self, name: str, project: str, base: str) -> Row:
        if any(name == known.name for known in self._models.all()):
            raise ApiError(409, f"'{name}' is the name of another model here", param="name")
        row: Row = {"id": name, "created": time.time(), "project": project, "base": base}
        with self._engine.begin() as connection:
            connection.execute(sa.insert(ART_MODELS).values(row))
        self._put(name, 0, served=base)
        self._names.add(name)
        return row


class ChoiceToken(BaseModel):
    """A sampled token in a choice's logprobs, with a name such as `token_id:7`."""

    token: str
    logprob: FiniteFloat


class ChoiceLogprobs(BaseModel):
    """The logprobs of a choice."""

    content: list[ChoiceToken] | None = None
    refusal: list[ChoiceToken] | None = None


class ArtChoice(BaseModel):
    """OpenAI's `Choice`. Its `finish_reason` distinguishes it from plain messages."""

    message: Message
    logprobs: ChoiceLogprobs | None = None


@dataclass(slots=True)
class _Branch:
    """A branch: turns whose tokens extend each other."""

    ids: tuple[int, ...] = ()
    turns: list[GrpoTurn] = field(default_factory=list)


def to_training_rows(groups: Sequence[ArtGroup], speech: TextCodec) -> tuple[list[GrpoRow], Counter[str]]:
    """Return rows of the groups whose rewards differ, and counts of drifted prompts and missing logprobs.

    Raises ApiError with the place of the fault.
    """
    counts: Counter[str] = Counter(drifted_prompts=0, trajectories_without_logprobs=0)
    rows = []
    for index, group in enumerate(groups):
        if len({trajectory.reward for trajectory in group.trajectories}) < 2:
            continue
        trajectories = []
        for number, trajectory in enumerate(group.trajectories):
            where, branches = f"trajectory_groups[{index}].trajectories[{number}]", list[_Branch]()
            for inside, history in enumerate([trajectory, *trajectory.additional_histories]):
                place = f"{where}.additional_histories[{inside - 1}]" if inside else where
                branches += _branches(history, speech, counts, place)
            counts["trajectories_without_logprobs"] += not branches
            trajectories += [
                GrpoTrajectory(turns=tuple(branch.turns), reward=trajectory.reward, episode=str(number))
                for branch in branches
            ]
        if len({each.reward for each in trajectories}) > 1:
            rows.append(GrpoRow(trajectories=tuple(trajectories)))
    return rows, counts


def _branches(history: ArtHistory, speech: TextCodec, counts: Counter[str], inside: str) -> list[_Branch]:
    """Return the branches of a history; none if no choice has logprobs."""
    branches: list[_Branch] = []
    messages: list[Message] = []
    for number, message in enumerate(history.messages_and_choices):
        if "finish_reason" not in message:
            messages.append(message)
            continue
        where = f"{inside}.messages_and_choices[{number}]"
        try:
            choice = validated(ArtChoice, message)
        except RequestError as error:
            raise _wrong(where, str(error)) from error
        if choice.logprobs is not None and (tokens := choice.logprobs.content or choice.logprobs.refusal):
            try:
                check_conversation(messages, history.tools)
                prompt = speech.template.prompt(ChatRequest(tuple(messages), tuple(history.tools or ()))).ids
            except (RequestError, EngineError) as error:
                raise _wrong(where, f"what comes before it is not a prompt: {error}") from error
            branch = branches[-1] if branches else None
            if branch is None or prompt[: len(branch.ids)] != branch.ids:
                counts["drifted_prompts"] += branch is not None
                branch = _Branch()
                branches.append(branch)
            sampled, context = tuple(_id(token, speech, where) for token in tokens), prompt[len(branch.ids) :]
            branch.ids = prompt + sampled
            if len(branch.ids) > speech.max_context:
                end = speech.max_context
                raise _wrong(where, f"{len(branch.ids)} tokens up to here, and the context ends at {end}")
            logprobs = tuple(token.logprob for token in tokens)
            branch.turns.append(GrpoTurn(context_ids=context, token_ids=sampled, logprobs=logprobs))
        # Keep the answer in the form in which a client would send it back.
        kept = {key: value for key, value in choice.message.items() if value is not None}
        messages.append({"content": "", **kept, "role": "assistant"})
    return branches


def _id(token: ChoiceToken, speech: TextCodec, where: str) -> int:
    name = token.token.removeprefix("token_id:")
    if name == token.token or not name.isdecimal():
        raise _wrong(
            where,
            f"the token {name!r} is named by its text, and not `token_id:…`; ask for the answer under the "
            "model's ART name, or with return_tokens_as_token_ids",
        )
    if int(name) >= speech.vocabulary:
        raise _wrong(where, f"token_id:{name} is not in the vocabulary of {speech.vocabulary}")
    return int(name)


def _wrong(where: str, message: str) -> ApiError:
    return ApiError(400, f"{where}: {message}", param=where, code="invalid_value")
