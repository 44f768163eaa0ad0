"""The config of a stored run: as text, and in parts, so that its agent need not be there to read it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etude.config.document import copied, read_document
from etude.config.load import MASK, parse_config
from etude.config.schema import Config
from etude.core.errors import RequestError

CONFIG = "config.yml"


def stored_data(run: Path) -> dict[str, Any]:
    """The content of the run's `config.yml`. Raises RequestError when there is none."""
    if not (run / CONFIG).is_file():
        raise RequestError(f"{run} has no {CONFIG}: it was not made by `etude train` or `etude evaluate`")
    return read_document(run / CONFIG).data


def model_config(run: Path, target_name: str | None = None) -> Config:
    """The trained model and the adapter that trained it, and nothing else of the run's config.

    `target_name` says which, in a run that trains several. Neither the agent's code nor its data is
    looked at. Raises ConfigError when the model's type is not known here.
    """
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
    """`method` and `backend`, the types of the builder and the adapter, and `base`, the model trained.

    None where a run trains several models, and `target_name` does not say which is meant.
    """
    names = _names(data.get("finetuning") or {}, target_name)
    model = _entry(data, "llms", names["model"])
    return {
        "method": _entry(data, "trajectory_builders", names["trajectory_builder"]).get("_type"),
        "backend": _entry(data, "trainer_adapters", names["trainer_adapter"]).get("_type"),
        "base": model.get("model") or model.get("model_name"),
    }


def is_local(run: Path, target_name: str | None = None) -> bool:
    """Whether the model that a run trains runs in this process: its weights are in the run folder then."""
    data = stored_data(run)
    model = _names(data.get("finetuning") or {}, target_name)["model"]
    return _entry(data, "llms", model).get("_type") == "local"


def _names(finetuning: Mapping[str, Any], target_name: str | None) -> dict[str, Any]:
    """The entries that a target, or the run, is trained with."""
    if target_name is not None:
        target = (finetuning.get("targets") or {}).get(target_name) or {}
        return {key: target.get(key) for key in ("model", "trajectory_builder", "trainer_adapter")}
    return {
        "model": finetuning.get("target_model"),
        "trajectory_builder": finetuning.get("trajectory_builder"),
        "trainer_adapter": finetuning.get("trainer_adapter"),
    }


def _entry(data: Mapping[str, Any], section: str, name: Any) -> Mapping[str, Any]:
    entry = (data.get(section) or {}).get(name)
    return entry if isinstance(entry, dict) else {}


def without_secrets(data: dict[str, Any]) -> dict[str, Any]:
    """The data without the keys whose values are not kept in run folders."""
    return dict(_clean(copied(data)))


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items() if item != MASK}
    return [_clean(item) for item in value] if isinstance(value, list) else value
