"""The application: which address shows what."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from etude.core.errors import EtudeError, RequestError
from etude.view import compare, episode, episodes, failures, runs, tokens
from etude.view.gate import Gate
from etude.view.library import Library
from etude.view.pages import STATIC, page

Page = Callable[[Request], Response]

_PAGES: dict[str, Page] = {
    "/": runs.list_page,
    "/compare": compare.compare_page,
    "/runs/{run}": runs.run_page,
    "/runs/{run}/failures": failures.failures_page,
    "/runs/{run}/now": runs.now_page,
    "/runs/{run}/config": runs.config_page,
    "/runs/{run}/phases": episodes.phases_page,
    "/runs/{run}/phases/{phase:path}": episodes.phase_page,
    "/runs/{run}/groups/{id:path}": episode.group_page,
    "/runs/{run}/examples/{example:path}": episode.example_page,
    "/runs/{run}/episodes/{id:path}": episode.episode_page,
    "/runs/{run}/tokens/{id:path}": tokens.tokens_page,
    "/runs/{run}/chunks/{id:path}": tokens.chunk_page,
}


def create_view(
    root: Path, key: str, *, host: str = "127.0.0.1", port: int = 0, shared: bool = False
) -> Gate:
    """The view of the runs in a folder, behind its gate: who has the key may look."""
    app = Starlette(
        routes=[
            Route("/health", lambda request: PlainTextResponse("ok\n")),
            Mount("/static", StaticFiles(directory=STATIC)),
            *(Route(path, _explained(answer)) for path, answer in _PAGES.items()),
        ],
        exception_handlers={HTTPException: _not_there},
    )
    app.state.library = Library(root)
    app.state.opened = tokens.Opened()
    return Gate(app, key, host, port, shared=shared)


def _explained(answer: Page) -> Page:
    """The page, or another that says why it cannot be shown."""

    @functools.wraps(answer)
    def explained(request: Request) -> Response:
        try:
            return answer(request)
        except RequestError as error:
            return page(request, "problem.html", 404, title="There is no such page", text=str(error))
        except EtudeError as error:
            return page(request, "problem.html", 500, title="This cannot be read", text=str(error))

    return explained


def _not_there(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    text = f"nothing is shown at {request.url.path}"
    return page(request, "problem.html", status, title="There is no such page", text=text)
