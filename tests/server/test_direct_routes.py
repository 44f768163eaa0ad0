"""Routes that are entered directly answer as FastAPI's do, errors and metrics included."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from etude.core.errors import EngineError, RequestError
from etude.server.direct_routes import DirectRoutes
from etude.server.errors import add_error_handlers, not_found

FAILURES = {
    "none": None,
    "request": RequestError("wrong", param="n"),
    "engine": EngineError("no answer"),
    "missing": not_found("model", "m", param="model", code="model_not_found"),
    "broken": RuntimeError("broken"),
}


class Both:
    """An application, and the route of each request that it has answered."""

    def __init__(self, *, directly: bool) -> None:
        router = APIRouter()
        router.add_api_route("/v1/answer", self.answer, methods=["POST"])
        app = FastAPI()
        add_error_handlers(app)
        app.include_router(router)
        self._app = DirectRoutes(app, router) if directly else app
        self.routes: list[Any] = []

    async def answer(self, request: Request) -> Response:
        if (error := FAILURES[(await request.body()).decode()]) is not None:
            raise error
        return Response(b"answered")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self.routes.append(getattr(scope.get("route"), "path", None))


async def told(directly: bool, method: str, path: str, body: str) -> tuple[Any, ...]:
    """Status, body and headers of an answer, the routes that were noted, and the error that is raised on."""
    app = Both(directly=directly)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        answer = await client.request(method, path, content=body)
    raised = None
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            await client.request(method, path, content=body)
    except RuntimeError as error:
        raised = str(error)
    return answer.status_code, answer.content, sorted(answer.headers.items()), app.routes, raised


@pytest.mark.parametrize("failure", FAILURES)
async def test_an_answer_is_the_one_that_fastapi_gives(failure: str) -> None:
    direct = await told(True, "POST", "/v1/answer", failure)
    assert direct == await told(False, "POST", "/v1/answer", failure)
    assert direct[3] == ["/v1/answer"] * 2
    assert direct[4] == ("broken" if failure == "broken" else None)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/v1/answer"), ("POST", "/v1/answer/"), ("POST", "/v1/no")]
)
async def test_what_is_no_such_route_is_fastapis(method: str, path: str) -> None:
    direct = await told(True, method, path, "none")
    assert direct == await told(False, method, path, "none")
    assert direct[0] >= 300
