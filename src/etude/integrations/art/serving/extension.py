"""ART's two protocols as an extension of the server: routes, and its names for models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from fastapi import APIRouter

from etude.integrations.art.serving.log import ArtLog
from etude.integrations.art.serving.models import ArtModels
from etude.integrations.art.serving.names import art_names, served_under
from etude.integrations.art.serving.preview import preview_routes
from etude.integrations.art.serving.routes import art_routes
from etude.integrations.art.serving.trainings import ArtTrainings
from etude.server.extensions import Alias, ServerParts


class ArtExtension:
    """Serves clients of ART 0.4 and 0.5."""

    open_paths = frozenset({"/healthcheck"})
    large_paths = frozenset({"/_train_model", "/_log", "/v1/preview/training-jobs"})

    def __init__(self) -> None:
        self._models: ArtModels | None = None

    def routes(self, parts: ServerParts) -> Sequence[APIRouter]:
        """Those of ART's training server, and those that its `ServerlessBackend` asks."""
        settings = parts.settings
        self._models = art = ArtModels(parts.database, parts.models, settings.model)
        log = ArtLog(settings.data_dir)
        trainings = ArtTrainings(settings, art, parts.models, parts.jobs, parts.files, log, parts.wake)
        return [
            art_routes(settings, parts.pool, parts.models, art, trainings, log),
            preview_routes(parts.pool, parts.models, art, trainings, parts.jobs, log),
        ]

    def aliases(self, connection: sa.Connection) -> Mapping[str, Alias]:
        """`agent@3` after three steps, and `agent` for the newest."""
        return {name: Alias(step.served, step.created) for name, step in art_names(connection).items()}

    def served_under(self, connection: sa.Connection, name: str) -> str | None:
        """The model of a step, by any of ART's names for it."""
        return served_under(connection, name)

    def tells_tokens(self, name: str) -> bool:
        """Whether a name is ART's: its clients learn from tokens and logprobs, and do not ask for them."""
        return self._models is not None and self._models.tells_tokens(name)
