"""The seam for what a server offers beside OpenAI's API: more routes, and more names for its models.

An extension registers itself by an import path in a module of components (entry-point group
`etude.components`); `etude serve` and its workers load it from there. The server knows none by name.
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
    """The parts of the server that routes of an extension can use."""

    settings: ServerSettings
    database: sa.Engine
    files: FileStore
    jobs: JobStore
    models: ModelStore
    pool: EnginePool
    wake: Callable[[], None]
    """Has the scheduler look at the queue of jobs."""


class ServerExtension(Protocol):
    """Something that a server can do beside OpenAI's API."""

    large_paths: frozenset[str]
    """Paths whose bodies are training data, and may be as large as a file."""
    names: ModelNames
    """Its names for models, which workers look up too."""

    def routes(self, parts: ServerParts) -> Sequence[APIRouter]:
        """The routes to serve. Called once, and not in workers."""

    def tells_tokens(self, name: str) -> bool:
        """Whether chats with the model of that name come with token ids and logprobs unasked."""


def register_server_extension(path: str) -> None:
    """Register the class of an extension, which is made without arguments, by its `module:name`."""
    if path not in _paths:
        _paths.append(path)


def load_extensions() -> list[ServerExtension]:
    """The registered extensions. Raises RequestError when one, or an installed package, cannot be loaded."""
    load_entry_points()
    extensions = []
    for path in _paths:
        try:
            extensions.append(pkgutil.resolve_name(path)())
        except (ImportError, AttributeError) as error:
            raise RequestError(f"the server's extension {path} cannot be loaded: {error}") from error
    return extensions
