"""ART's two protocols as an extension of the server: routes, and its names for models."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter

from etude.integrations.art.serving.bodies import ArtLog
from etude.integrations.art.serving.models import ArtModels, ArtNames
from etude.integrations.art.serving.routes import art_routes, preview_routes
from etude.integrations.art.serving.trainings import ArtTrainings
from etude.server.extensions import ServerParts


class ArtExtension:
    """Serves clients of ART 0.4 and 0.5."""

    open_paths = frozenset({"/healthcheck"})
    large_paths = frozenset({"/_train_model", "/_log", "/v1/preview/training-jobs"})
    names = ArtNames()

    def __init__(self) -> None:
        self._models: ArtModels | None = None

    def routes(self, parts: ServerParts) -> Sequence[APIRouter]:
        """Those of ART's training server, and those that its `ServerlessBackend` asks."""
        self._models = art = ArtModels(parts.database, parts.models, parts.settings.model)
        log = ArtLog(parts.settings.data_dir)
        trainings = ArtTrainings(parts, art, log)
        return [art_routes(parts, art, trainings, log), preview_routes(parts, art, trainings, log)]

    def tells_tokens(self, name: str) -> bool:
        """Whether a name is ART's: its clients learn from tokens and logprobs, and do not ask for them."""
        return self._models is not None and self._models.tells_tokens(name)
