"""The request behind a stored run: its config, readable without its agent, and its evaluation request.

An evaluation's request is kept in the folder next to the config, so that the evaluation can be resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from etude.config.document import parse_document, read_document, strings
from etude.config.load import parse_config
from etude.config.registry import LIVE
from etude.config.schema import Config
from etude.core.errors import RequestError, StoreError
from etude.core.secrets import MASK
from etude.store.database import DATABASE
from etude.store.files import write_atomically
from etude.store.run_folder import CONFIG_STEP, RunFolder

CONFIG = "config.yml"
REQUEST = "request.json"

_SUM = "# SHA-256 of the lines above: "


def config_text(yaml: str) -> str:
    """Return the content of a run's `config.yml`: YAML, and its digest to detect a truncated file."""
    return f"{yaml}{_SUM}{hashlib.sha256(yaml.encode()).hexdigest()}\n"


def config_damage(run: Path) -> str | None:
    """Return how the run's `config.yml` is damaged, as a clause. None if it is whole or missing."""
    try:
        text = (run / CONFIG).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"{CONFIG} cannot be read ({error})"
    if not text:
        return f"{CONFIG} is empty"
    yaml, line, _ = text.rpartition(_SUM)
    if not line:
        return f"{CONFIG} is cut off: its last line, which has the digest of the others, is missing"
    return None if config_text(yaml) == text else f"{CONFIG} is not what was written"


async def keep_config(run: RunFolder) -> None:
    """Copy the run's `config.yml` to its journal, if there is one."""
    if (run.path / CONFIG).is_file():
        text = (run.path / CONFIG).read_text(encoding="utf-8")
        if run.journal.get(CONFIG_STEP) != text:
            await run.journal.put(CONFIG_STEP, text)


def bring_back_config(run: Path) -> None:
    """Restore a missing `config.yml` from the run's journal. Raises StoreError."""
    if not (run / CONFIG).exists() and (run / DATABASE).is_file():
        with RunFolder.read(run) as folder:
            text = folder.journal.get(CONFIG_STEP)
        if text is not None:
            write_atomically(run / CONFIG, text, exact=True)


def stored_data(run: Path, *, required: bool = True) -> dict[str, Any]:
    """Return the run's config, or its copy in the journal. Without both it is empty, unless `required`."""
    if (damage := config_damage(run)) is not None:
        raise StoreError(
            f"{run / CONFIG} is damaged: {damage}. Delete it: the journal has a copy. Settings are changed "
            "with `etude resume -o`"
        )
    if (run / CONFIG).is_file():
        return read_document(run / CONFIG).data
    if (run / DATABASE).is_file():
        with RunFolder.read(run) as folder:
            if (text := folder.journal.get(CONFIG_STEP)) is not None:
                return parse_document(text, run / CONFIG).data
    if not required:
        return {}
    raise RequestError(
        f"{run} has no {CONFIG}, and its journal has no copy: it was not made by `etude train` or `etude "
        "evaluate`"
    )


def needs_program(run: Path) -> bool:
    """Return whether parts of the run were a program's Python objects, which its config only names."""
    values = strings(stored_data(run, required=False))
    return any(path[-1] == "_type" and value == LIVE for path, value in values)


def list_evaluators(data: Mapping[str, Any]) -> list[str]:
    """Return the names of the evaluators in a run's config."""
    return list((data.get("eval") or {}).get("evaluators") or {})


def reward_names(data: Mapping[str, Any]) -> dict[str | None, str]:
    """Return the reward's evaluator by target. The key is None in a run that trains one model."""
    finetuning = data.get("finetuning") or {}
    blocks: Mapping[str | None, Any] = finetuning.get("targets") or {None: finetuning}
    rewards = {target: (block or {}).get("reward_function") or {} for target, block in blocks.items()}
    return {target: reward["name"] for target, reward in rewards.items() if reward.get("name") is not None}


def model_config(run: Path, target_name: str | None = None) -> Config:
    """Return a config with only a run's trained model and its adapter. Raises ConfigError."""
    data = stored_data(run)
    finetuning = data.get("finetuning") or {}
    names = _names(finetuning, target_name)
    target, adapter = names["model"], names["trainer_adapter"]
    kept: dict[str, Any] = {
        "llms": {target: (data.get("llms") or {}).get(target)} if target else {},
        "trainer_adapters": {adapter: (data.get("trainer_adapters") or {}).get(adapter)} if adapter else {},
        "finetuning": {"target_model": target, "trainer_adapter": adapter},
    }
    for key in ("seed", "deterministic"):
        if key in finetuning:
            kept["finetuning"][key] = finetuning[key]
    return parse_config(without_secrets(kept))


def trained_parts(data: Mapping[str, Any], target_name: str | None = None) -> dict[str, Any]:
    """Return `method` and `backend`, the types of the builder and the adapter, and `base`, the trained model.

    They are None if a run trains several models and `target_name` does not select one.
    """
    names = _names(data.get("finetuning") or {}, target_name)
    model = _entry(data, "llms", names["model"])
    return {
        "method": _entry(data, "trajectory_builders", names["trajectory_builder"]).get("_type"),
        "backend": _entry(data, "trainer_adapters", names["trainer_adapter"]).get("_type"),
        "base": model.get("model") or model.get("model_name") or ("tiny" if model.get("tiny") else None),
    }


def is_local(run: Path, target_name: str | None = None) -> bool:
    """Return whether the trained model runs in this process. Then its weights are in the run folder."""
    data = stored_data(run)
    model = _names(data.get("finetuning") or {}, target_name)["model"]
    return _entry(data, "llms", model).get("_type") == "local"


def _names(finetuning: Mapping[str, Any], target_name: str | None) -> dict[str, Any]:
    block, model = finetuning, "target_model"
    if target_name is not None:
        block, model = (finetuning.get("targets") or {}).get(target_name) or {}, "model"
    others = {key: block.get(key) for key in ("trajectory_builder", "trainer_adapter")}
    return {"model": block.get(model), **others}


def _entry(data: Mapping[str, Any], section: str, name: Any) -> Mapping[str, Any]:
    entry = (data.get(section) or {}).get(name)
    return entry if isinstance(entry, dict) else {}


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


def read_request(folder: Path) -> EvaluationRequest | None:
    """Return the evaluation that a run folder is for, or None for a training run. Raises StoreError."""
    path = folder / REQUEST
    try:
        return EvaluationRequest.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StoreError(f"{path} cannot be read: {error}; start the evaluation anew") from error


def evaluated_model(request: EvaluationRequest, base: str | None) -> str | None:
    """Return the evaluated model: `run:v3`, or else `base`, the model that the config names."""
    if request.run is None:
        return base
    whose = "" if request.target is None else f"{request.target}:"
    return f"{Path(request.run).name}:{whose}{f'v{request.version}' if request.version else 'base'}"
