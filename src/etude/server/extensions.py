"""Server extensions: more routes and model names besides OpenAI's API.

A module of components (entry-point group `etude.components`) registers an extension by its import path.
`etude serve` and its workers load it from there. The server knows no extension by name.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from etude.config.registry import load_entry_points
from etude.core.errors import RequestError

if TYPE_CHECKING:
    import sqlalchemy as sa
    from fastapi import APIRouter

    from etude.server.engines import EnginePool
    from etude.server.files import FileStore
    from etude.server.jobs import JobStore
    from etude.server.models import ModelNames, ModelStore
    from etude.server.settings import ServerSettings

_paths: list[str] = []


@dataclass(frozen=True, slots=True)
class ServerParts:
    """The parts of the server that an extension's routes can use."""

    settings: ServerSettings
    database: sa.Engine
    files: FileStore
    jobs: JobStore
    models: ModelStore
    pool: EnginePool
    wake: Callable[[], None]
    """Wakes the scheduler to look at the job queue."""


class ServerExtension(Protocol):
    """A server feature besides OpenAI's API."""

    large_paths: frozenset[str]
    """Paths whose bodies are training data, and may be as large as a file."""
    names: ModelNames
    """The extension's names for models. Workers look them up too."""

    def routes(self, parts: ServerParts) -> Sequence[APIRouter]:
        """Return the routes to serve. Called once, and not in workers."""

    def tells_tokens(self, name: str) -> bool:
        """Return whether a model's chat answers include token ids and logprobs by default."""


def register_server_extension(path: str) -> None:
    """Register an extension's class by its `module:name`. The class takes no arguments."""
    if path not in _paths:
        _paths.append(path)


def load_extensions() -> list[ServerExtension]:
    """Return the registered extensions. Raises RequestError if one, or an installed package, cannot load."""
    load_entry_points()
    extensions = []
    for path in _paths:
        try:
            extensions.append(pkgutil.resolve_name(path)())
        except (ImportError, AttributeError) as error:
            raise RequestError(f"the server's extension {path} cannot be loaded: {error}") from error
    return extensions
