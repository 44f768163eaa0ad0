"""What a run was asked to do, where that is not training: kept in its folder, so that it can go on."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from etude.core.errors import StoreError
from etude.store.files import write_atomically

_FILE = "request.json"
RESULT = "evaluation.json"
"""Written when an evaluation is over."""


class EvaluationRequest(BaseModel):
    """An evaluation, as `etude evaluate` was asked for it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: str | None = None
    """The folder of the training run whose weights are evaluated; None for those that the config names."""
    version: int | None = None
    """Which of its versions; 0 is the base model."""
    target: str | None = None
    """Which of its models, where it trains several."""
    repeat: int = Field(default=1, ge=1)
    """Episodes for each example."""
    greedy: bool = False
    """Whether the most likely token is taken each time."""


def write_request(folder: Path, request: EvaluationRequest) -> None:
    """Keep the request in a run folder. Raises StoreError."""
    write_atomically(folder / _FILE, request.model_dump_json(indent=2) + "\n")


def read_request(folder: Path) -> EvaluationRequest | None:
    """The evaluation that a run folder is for; None when it is a training run. Raises StoreError."""
    path = folder / _FILE
    try:
        return EvaluationRequest.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StoreError(f"{path} cannot be read: {error}; start the evaluation anew") from error


def evaluated_model(request: EvaluationRequest, base: str | None) -> str | None:
    """The model that an evaluation is of: `run:v3`, or `base`, the model that its config names."""
    if request.run is None:
        return base
    whose = "" if request.target is None else f"{request.target}:"
    return f"{Path(request.run).name}:{whose}{f'v{request.version}' if request.version else 'base'}"
