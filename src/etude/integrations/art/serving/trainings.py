"""Trainings: each is a job of the method `grpo`, followed line by line for as long as its client listens.

The protocol has no word for failure: the end of the lines is success. So a line is sent when it is known
that the job goes on or has made its model. A job that fails before gets an error's status, and one that
fails later breaks the connection.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import math
import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from etude.core.keys import content_hash
from etude.integrations.art.serving.bodies import ArtLog, TrainBody, parsed
from etude.integrations.art.serving.models import ArtModels, Begun
from etude.integrations.art.serving.options import hyperparameters
from etude.integrations.art.serving.rows import ArtRows, rows_of
from etude.models.speech import Speech
from etude.server.database import Row
from etude.server.extensions import ServerParts
from etude.server.hyperparameters import Hyperparameters, require_doable, resolved
from etude.server.inference import unless_gone
from etude.server.jobs import JobStore
from etude.wire.http_server import ApiError

HUNG_UP = 499
"""The status of a request whose client is gone."""

_LOG = logging.getLogger("etude.server")

_LOOK_SECONDS = 0.2
_EVENTS = 1000
_PROGRESS = ("step", "total_steps", "epoch")
"""Keys of a step's metrics that say how far the job is."""

Line = dict[str, float]


def line_of(metrics: Mapping[str, Any], steps: int, counts: Mapping[str, float]) -> Line:
    """One line; `steps` is the number of all, under the names of both releases, which each line has."""
    numbers = {
        name: float(value)
        for name, value in metrics.items()
        if name not in _PROGRESS and isinstance(value, int | float) and math.isfinite(value)
    }
    return {**counts, **numbers, "num_gradient_steps": steps, "data/step_num_gradient_steps": float(steps)}


async def lines_of(
    jobs: JobStore, job: str, counts: Mapping[str, float], request: Request
) -> AsyncIterator[Line]:
    """The lines of a job until it has made its model.

    Raises ApiError when it does not, and with the status 499 when the client hangs up.
    """
    sent = 0
    while True:
        row = await asyncio.to_thread(jobs.get, job)
        steps = await asyncio.to_thread(steps_of_job, jobs, job)
        over = row["status"] == "succeeded"
        for step in steps[sent : None if over else max(sent, len(steps) - 1)]:
            sent += 1
            yield line_of(step, int(step["total_steps"]), counts)
        if over:
            return
        _require_hope(row)
        await unless_gone(request, lambda: asyncio.sleep(_LOOK_SECONDS))


class LineStream(StreamingResponse):
    """Sends lines as they come. That the client hangs up is noticed by what makes them."""

    def __init__(self, first: list[Line], rest: AsyncIterator[Line]) -> None:
        async def content() -> AsyncIterator[bytes]:
            for line in first:
                yield _encoded(line)
            try:
                async for line in rest:
                    yield _encoded(line)
            except ApiError as error:
                if error.status_code != HUNG_UP:
                    raise

        super().__init__(content(), media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        await self.stream_response(send)


def _encoded(line: Line) -> bytes:
    return json.dumps(line).encode() + b"\n"


def steps_of_job(jobs: JobStore, job: str) -> list[dict[str, Any]]:
    """The metrics of the job's steps so far, in their order."""
    rows, _ = jobs.events(job, None, _EVENTS)
    return sorted((row["data"] for row in rows if row["type"] == "metrics"), key=lambda data: data["step"])


def _require_hope(row: Row) -> None:
    if row["status"] == "failed":
        error = row["error"]
        status = 400 if error["code"] == "invalid_request" else 500
        raise ApiError(status, f"job {row['id']} failed: {error['message']}", code=error["code"])
    if row["status"] == "cancelled":
        raise ApiError(409, f"job {row['id']} was cancelled", code="job_cancelled")


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

    def __init__(self, server: ServerParts, art: ArtModels, log: ArtLog) -> None:
        self._server = server
        self._art = art
        self._log = log
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
        given = await run_in_threadpool(lambda: rows_of(body.trajectory_groups, self._speech))
        async with self._beginning:
            if not given.rows:
                step = await run_in_threadpool(self._art.skip, body.model)
                _LOG.warning("%s: nothing to learn from: in every group all rewards are the same", step.name)
                return Submitted(step.name, None, given.counts)
            begun = await run_in_threadpool(self._begin, body, asked, given)
        self._server.wake()
        return Submitted(f"{body.model.name}@{begun.step}", begun.job, given.counts)

    @cached_property
    def _speech(self) -> Speech:
        """The tokenizer and template that all models here share."""
        return Speech.load(self._server.settings.model)

    def _begin(self, body: TrainBody, asked: Hyperparameters, given: ArtRows) -> Begun:
        """The job of the next step: a new one, or the one that trains on the same already."""
        lines = "".join(row.model_dump_json(exclude_none=True) + "\n" for row in given.rows)
        request_hash = content_hash([lines, asked.model_dump(mode="json")])
        base = self._art.base_of(body.model)
        if asked.given().get("beta") and base != self._server.models.base.name:
            raise ApiError(
                400, f"beta pulls to the server's own model, and '{base}' was made of it", param="beta"
            )
        begun = self._art.begin(body.model, request_hash)
        if not begun.is_new:
            return begun
        self._server.jobs.require_place(self._server.settings.waiting_jobs)
        name = body.model.name
        values = self._values(asked, begun, len(given.rows))
        self._log.write(name, "train", begun.start.step, body.trajectory_groups)
        file = self._server.files.upload(f"{name}-{begun.step}.jsonl", io.BytesIO(lines.encode()))
        suffix = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:64]
        facts = {"training_file": file["id"], "suffix": suffix, "request_hash": request_hash, "id": begun.job}
        self._server.jobs.create(
            values | facts | {"metadata": {"art_model": name, "art_step": str(begun.step)}}
        )
        return begun

    def _values(self, asked: Hyperparameters, begun: Begun, rows: int) -> dict[str, Any]:
        start = self._server.models.get(begun.start.served)
        try:
            values = resolved("grpo", asked, rows, start.lora, fine_tuned=start.folder is not None)
        except ValueError as error:
            raise ApiError(400, f"peft_args.r: {error}", param="peft_args.r") from error
        require_doable(self._server.settings, values, rows=rows, place="peft_args")
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
            async for line in lines_of(self._server.jobs, job, counts, request):
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
            await run_in_threadpool(self._server.jobs.cancel, job)
        except ApiError as error:
            _LOG.info("%s", error.detail)  # It was done just then.
        self._server.wake()


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
