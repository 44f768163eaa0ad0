"""The lines of a training: the metrics of each optimiser step of its job, as ART's clients read them.

The protocol has no word for failure: the end of the lines is success. So a line is told when it is known
that the job goes on or has made its model. A job that fails before gets an error's status, and one that
fails later breaks the connection.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from etude.server.database import Row
from etude.server.errors import ApiError
from etude.server.generation import unless_gone
from etude.server.jobs import JobStore

HUNG_UP = 499
"""The status of a request whose client is gone."""

_LOOK_SECONDS = 0.2
_EVENTS = 1000
_PLACES = ("step", "total_steps", "epoch")

Line = dict[str, float]


def line_of(metrics: Mapping[str, Any], steps: int, counts: Mapping[str, float]) -> Line:
    """One line; `steps` is the number of all, under the names of both releases, which each line has."""
    told = {
        name: float(value)
        for name, value in metrics.items()
        if name not in _PLACES and isinstance(value, int | float) and math.isfinite(value)
    }
    return {**counts, **told, "num_gradient_steps": steps, "data/step_num_gradient_steps": float(steps)}


async def lines_of(
    jobs: JobStore, job: str, counts: Mapping[str, float], request: Request
) -> AsyncIterator[Line]:
    """The lines of a job until it has made its model.

    Raises ApiError when it does not, and with the status 499 when the client hangs up.
    """
    told = 0
    while True:
        row = await asyncio.to_thread(jobs.get, job)
        steps = await asyncio.to_thread(steps_of_job, jobs, job)
        over = row["status"] == "succeeded"
        for step in steps[told : None if over else max(told, len(steps) - 1)]:
            told += 1
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
    """What is known of the job's steps, in their order."""
    rows, _ = jobs.events(job, None, _EVENTS)
    return sorted((row["data"] for row in rows if row["type"] == "metrics"), key=lambda data: data["step"])


def _require_hope(row: Row) -> None:
    if row["status"] == "failed":
        error = row["error"]
        status = 400 if error["code"] == "invalid_request" else 500
        raise ApiError(status, f"job {row['id']} failed: {error['message']}", code=error["code"])
    if row["status"] == "cancelled":
        raise ApiError(409, f"job {row['id']} was cancelled", code="job_cancelled")
