"""Trainings: each is a job of the method `grpo`, followed for as long as its client listens."""

from __future__ import annotations

import asyncio
import io
import logging
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import Request, Response
from starlette.concurrency import run_in_threadpool

from etude.core.keys import content_hash
from etude.integrations.art.serving.bodies import TrainBody, parsed
from etude.integrations.art.serving.lines import HUNG_UP, Line, LineStream, line_of, lines_of
from etude.integrations.art.serving.log import ArtLog
from etude.integrations.art.serving.models import ArtModels, Begun
from etude.integrations.art.serving.options import hyperparameters
from etude.integrations.art.serving.rows import ArtRows, rows_of
from etude.models.speech import Speech
from etude.server.errors import ApiError
from etude.server.files import FileStore
from etude.server.hyperparameters import Hyperparameters, resolved
from etude.server.jobs import JobStore
from etude.server.models import ModelStore
from etude.server.settings import ServerSettings

_LOG = logging.getLogger("etude.server")


@dataclass(frozen=True, slots=True)
class Submitted:
    """A train request that was taken."""

    step: str
    """The step that it makes: `agent@3`."""
    job: str | None
    """None where there was nothing to learn from, and the step is there already."""
    counts: Mapping[str, float]


class ArtTrainings:
    """Makes jobs of train requests. What must survive the server is in the database before a job is."""

    def __init__(
        self,
        settings: ServerSettings,
        art: ArtModels,
        models: ModelStore,
        jobs: JobStore,
        files: FileStore,
        log: ArtLog,
        woken: Callable[[], None],
    ) -> None:
        """`woken` tells the scheduler that something changed."""
        self._settings = settings
        self._art = art
        self._models = models
        self._jobs = jobs
        self._files = files
        self._log = log
        self._woken = woken
        self._beginning = asyncio.Lock()
        self._followers: Counter[str] = Counter()

    async def train(self, request: Request) -> Response:
        """Answer a train request. Raises ApiError when it, or its job, cannot be done."""
        content = await request.body()
        given = await self.submit(await run_in_threadpool(parsed, TrainBody, content))
        if given.job is None:
            return LineStream([line_of({}, 0, given.counts)], _nothing())
        lines = self._followed(given.job, given.counts, request)
        return LineStream([line async for line in _first(lines)], lines)

    async def submit(self, body: TrainBody) -> Submitted:
        """Have the next step made. Raises ApiError when that cannot be."""
        asked = _asked(body)
        await run_in_threadpool(self._art.newest, body.model)
        given = await run_in_threadpool(self._read, body)
        async with self._beginning:
            if not given.rows:
                step = await run_in_threadpool(self._art.skip, body.model)
                _LOG.warning("%s: nothing to learn from: in every group all rewards are the same", step.name)
                return Submitted(step.name, None, given.counts)
            begun = await run_in_threadpool(self._begin, body, asked, given)
        self._woken()
        return Submitted(f"{body.model.name}@{begun.step}", begun.job, given.counts)

    @cached_property
    def _speech(self) -> Speech:
        """The tokenizer and template that all models here share."""
        return Speech.load(self._settings.model)

    def _read(self, body: TrainBody) -> ArtRows:
        return rows_of(body.trajectory_groups, self._speech)

    def _begin(self, body: TrainBody, asked: Hyperparameters, given: ArtRows) -> Begun:
        """The job of the next step: a new one, or the one that trains on the same already."""
        lines = "".join(row.model_dump_json(exclude_none=True) + "\n" for row in given.rows)
        told = content_hash([lines, asked.model_dump(mode="json")])
        base = self._art.base_of(body.model)
        if asked.given().get("beta") and base != self._models.base.name:
            raise ApiError(
                400, f"beta pulls to the server's own model, and '{base}' was made of it", param="beta"
            )
        begun = self._art.begin(body.model, told)
        if not begun.is_new:
            return begun
        self._jobs.require_place(self._settings.waiting_jobs)
        name = body.model.name
        values = self._values(asked, begun, len(given.rows))
        self._log.write(name, "train", begun.start.step, body.trajectory_groups)
        file = self._files.upload(f"{name}-{begun.step}.jsonl", io.BytesIO(lines.encode()))
        suffix = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64]
        facts = {"training_file": file["id"], "suffix": suffix, "request_hash": told, "id": begun.job}
        self._jobs.create(values | facts | {"metadata": {"art_model": name, "art_step": str(begun.step)}})
        return begun

    def _values(self, asked: Hyperparameters, begun: Begun, rows: int) -> dict[str, Any]:
        start = self._models.get(begun.start.served)
        try:
            values = resolved("grpo", asked, rows, start.lora, fine_tuned=start.folder is not None)
        except ValueError as error:
            raise ApiError(400, f"peft_args.r: {error}", param="peft_args.r") from error
        return {
            "model": start.name,
            "method": "grpo",
            "validation_file": None,
            "seed": secrets.randbits(31),
            "hyperparameters": values,
            "idempotency_key": None,
        }

    async def _followed(self, job: str, counts: Mapping[str, float], request: Request) -> AsyncIterator[Line]:
        """The lines of a job, which is cancelled when the last client that follows it hangs up."""
        self._followers[job] += 1
        hung_up = False
        try:
            async for line in lines_of(self._jobs, job, counts, request):
                yield line
        except ApiError as error:
            hung_up = error.status_code == HUNG_UP
            raise
        finally:
            self._followers[job] -= 1
            if not self._followers[job]:
                del self._followers[job]
                if hung_up:
                    await self._cancel(job)

    async def _cancel(self, job: str) -> None:
        try:
            await run_in_threadpool(self._jobs.cancel, job)
        except ApiError as error:
            _LOG.info("%s", error.detail)  # It was done just then.
        self._woken()


def _asked(body: TrainBody) -> Hyperparameters:
    try:
        return hyperparameters(body.model.internal, body.config, body.dev_config)
    except ValueError as error:
        raise ApiError(400, str(error), param="config", code="invalid_value") from error


async def _first(lines: AsyncIterator[Line]) -> AsyncIterator[Line]:
    """The first line, where there is one."""
    async for line in lines:
        yield line
        return


async def _nothing() -> AsyncIterator[Line]:
    return
    yield
