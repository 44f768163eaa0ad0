"""The request behind a stored run: its config, readable without its agent, and its evaluation request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from etude.config.document import parse_document, strings, value_at
from etude.config.load import parse_config
from etude.config.registry import LIVE
from etude.config.schema import SECTION_OF, Config
from etude.core.errors import RequestError
from etude.core.secrets import MASK
from etude.store.database import DATABASE
from etude.store.journal import Journal
from etude.store.run_folder import CONFIG, CONFIG_STEP, REQUEST_STEP, RunFolder


def stored_text(run: Path) -> str | None:
    """Return the config of a run as YAML; None if it was made without one. Raises StoreError."""
    if not (run / DATABASE).is_file():
        return None
    with RunFolder.read(run) as folder:
        text: str | None = folder.journal.get(CONFIG_STEP)
    return text


def stored_data(run: Path, *, required: bool = True) -> dict[str, Any]:
    """Return the config of a run. Without one it is empty, unless `required`. Raises StoreError."""
    if (text := stored_text(run)) is not None:
        return parse_document(text, run / CONFIG).data
    if not required:
        return {}
    raise RequestError(
        f"{run} has no config: it was stopped as it began, or not made by `etude train` or `etude evaluate`; "
        "start another run"
    )


def needs_program(run: Path) -> bool:
    """Return whether parts of the run were a program's Python objects, which its config only names."""
    values = strings(stored_data(run, required=False))
    return any(path[-1] == "_type" and value == LIVE for path, value in values)


def reward_names(run: Path) -> dict[str | None, str]:
    """Return the reward's evaluator by target. The key is None in a run that trains one model."""
    block = value_at(stored_data(run, required=False), ("finetuning",))
    blocks: Mapping[str | None, Any] = value_at(block, ("targets",)) or {None: block}
    names = {target: value_at(own, ("reward_function", "name")) for target, own in blocks.items()}
    return {target: name for target, name in names.items() if name is not None}


def reward_name(run: Path) -> str | None:
    """Return the evaluator whose score is the reward; with several targets, the first one's."""
    return next(iter(reward_names(run).values()), None)


def model_config(run: Path, target: str | None = None) -> Config:
    """Return a config with only a run's trained model and its adapter. Raises ConfigError."""
    data = stored_data(run)
    (model, llm), (adapter, settings) = _entry(data, target, "model"), _entry(data, target, "trainer_adapter")
    block = {"target_model": model, "trainer_adapter": adapter}
    for key in ("seed", "deterministic"):
        if (value := value_at(data, ("finetuning", key))) is not None:
            block[key] = value
    kept: dict[str, Any] = {
        "llms": {model: llm} if model else {},
        "trainer_adapters": {adapter: settings} if adapter else {},
        "finetuning": block,
    }
    return parse_config(without_secrets(kept))


def trained_parts(data: Mapping[str, Any], target: str | None = None) -> dict[str, Any]:
    """Return `method` and `backend`, the types of the builder and the adapter, and `base`, the trained model.

    They are None if a run trains several models and `target` does not select one.
    """
    model, builder, adapter = (
        _entry(data, target, part)[1] for part in ("model", "trajectory_builder", "trainer_adapter")
    )
    base = model.get("model") or model.get("model_name") or ("tiny" if model.get("tiny") else None)
    return {"method": builder.get("_type"), "backend": adapter.get("_type"), "base": base}


def is_local(run: Path, target: str | None = None) -> bool:
    """Return whether the trained model runs in this process. Then its weights are in the run folder."""
    return _entry(stored_data(run), target, "model")[1].get("_type") == "local"


def _entry(data: Mapping[str, Any], target: str | None, part: str) -> tuple[Any, dict[str, Any]]:
    """Return the name and the entry of a part that trains a model; None and an empty entry without one."""
    block = ("finetuning",) if target is None else ("finetuning", "targets", target)
    key = "target_model" if part == "model" and target is None else part
    name = value_at(data, (*block, key))
    return name, value_at(data, (SECTION_OF.get(part, "llms"), name)) or {}


def without_secrets(value: Any) -> Any:
    """Return the data without the keys whose values are not kept in run folders."""
    if isinstance(value, dict):
        return {key: without_secrets(item) for key, item in value.items() if item != MASK}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value


class EvaluationRequest(BaseModel, frozen=True, extra="forbid"):
    """The arguments of an evaluation by `etude evaluate`."""

    run: str | None = None
    """The folder of the training run whose weights are evaluated, or None for the config's own models."""
    version: int | None = None
    """The version to evaluate; 0 is the base model."""
    target: str | None = None
    """The model to evaluate, in a run that trains several."""
    repeat: int = Field(default=1, ge=1)
    """The number of episodes for each example."""
    greedy: bool = False
    """Whether the most likely token is always taken."""


def read_request(journal: Journal) -> EvaluationRequest | None:
    """Return the evaluation that a run is for, or None for another kind of run. Raises StoreError."""
    stored = journal.get(REQUEST_STEP)
    return None if stored is None else EvaluationRequest.model_validate(stored)
