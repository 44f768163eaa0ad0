"""The config of a stored run: as text, and in parts, so that its agent need not be there to read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from etude.config.document import copied
from etude.config.load import MASK, parse_config
from etude.config.schema import Config
from etude.config.yaml_file import read_document
from etude.core.errors import RequestError

CONFIG = "config.yml"


def stored_data(run: Path) -> dict[str, Any]:
    """The content of the run's `config.yml`. Raises RequestError when there is none."""
    if not (run / CONFIG).is_file():
        raise RequestError(f"{run} has no {CONFIG}: it was not made by `etude train` or `etude evaluate`")
    return read_document(run / CONFIG).data


def model_config(run: Path) -> Config:
    """The trained model and the adapter that trained it, and nothing else of the run's config.

    Neither the agent's code nor its data is looked at. Raises ConfigError when the model's type is
    not known here.
    """
    data = stored_data(run)
    finetuning = data.get("finetuning") or {}
    target, adapter = finetuning.get("target_model"), finetuning.get("trainer_adapter")
    kept: dict[str, Any] = {
        "llms": {target: (data.get("llms") or {}).get(target)} if target else {},
        "trainer_adapters": {adapter: (data.get("trainer_adapters") or {}).get(adapter)} if adapter else {},
        "finetuning": {"target_model": target, "trainer_adapter": adapter},
    }
    for key in ("seed", "deterministic"):
        if key in finetuning:
            kept["finetuning"][key] = finetuning[key]
    return parse_config(without_secrets(kept))


def without_secrets(data: dict[str, Any]) -> dict[str, Any]:
    """The data without the keys whose values are not kept in run folders."""
    return dict(_clean(copied(data)))


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _clean(item) for key, item in value.items() if item != MASK}
    return [_clean(item) for item in value] if isinstance(value, list) else value
