"""Another model in place of the one that a config names, as overrides of the config."""

from __future__ import annotations

import json

from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.inference.local import LocalLlmConfig
from etude.models.source import folder_of
from etude.store.stored_config import model_config
from etude.store.versions import RunVersion


def model_overrides(config: Config, text: str, wanted: RunVersion | None) -> list[tuple[str, str]]:
    """What to override so that the target model is `text`: a folder or a name, or a version of a run.

    For a version it is the model that the run began from; its weights are adopted later. Raises
    RequestError when the config does not say which of its models is meant.
    """
    target = replaced_model(config, wanted)
    if target is None:
        several = ", ".join(config.llms) or "none"
        raise RequestError(
            f"--model: the config has several models ({several}); name one as 'finetuning.target_model'"
        )
    llm = config.llms[target]
    if wanted is not None:
        base = model_config(wanted.run, wanted.target)
        there = base.llms.get(base.finetuning.target_model or "")
        if isinstance(there, LocalLlmConfig) and isinstance(llm, LocalLlmConfig):
            return [_override(target, "model", str(there.model))]
        if there is not None and there.type_name == llm.type_name:
            return []
        raise RequestError(
            f"--model {text}: that run trained a model of another kind than llms.{target} "
            f"(`_type: {llm.type_name}`); use the run's own config"
        )
    if isinstance(llm, LocalLlmConfig):
        folder = folder_of(text)
        return [_override(target, "model", text if folder is None else str(folder.absolute()))]
    if "model_name" in type(llm).model_fields:
        return [_override(target, "model_name", text)]
    raise RequestError(f"--model: llms.{target} (`_type: {llm.type_name}`) has no key for a model's name")


def replaced_model(config: Config, wanted: RunVersion | None) -> str | None:
    """The entry of `llms` that a wished-for model takes the place of; None when that is not clear."""
    targets = config.finetuning.targets
    if wanted is not None and wanted.target in targets:
        return targets[wanted.target].model
    return config.finetuning.target_model


def _override(target: str, key: str, value: str) -> tuple[str, str]:
    return f"llms.{target}.{key}", json.dumps(value, ensure_ascii=False)
