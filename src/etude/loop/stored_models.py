"""The models of stored runs: loading their weights, and using one instead of the config's model."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

from etude.backends.capabilities import LocalAdapterConfig
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.engines.local import LocalLlmConfig, base_folder, require_local_extra
from etude.models.source import local_path, require_base
from etude.store.facts import RunVersion
from etude.store.files import damage_in, require_whole
from etude.store.run_folder import RunFolder
from etude.store.stored_config import model_config

if TYPE_CHECKING:
    from etude.models.policy import Policy


_LOG = logging.getLogger("etude.versions")


def load_version(wanted: RunVersion) -> Policy:
    """Load the run's local model with the weights of version `wanted`, on the device from its config.

    Raises RequestError when the run's model is not local or its base has changed. Raises MissingExtraError
    without torch, EngineError when the weights are not the ones that the run recorded.
    """
    config = model_config(wanted.run, wanted.target)
    target = config.finetuning.target_model
    llm = config.llms.get(target) if target is not None else None
    if not isinstance(llm, LocalLlmConfig):
        kind = "of no known type" if llm is None else f"`_type: {llm.type_name}`"
        problem = f"the model of run {wanted.run.name} is {kind}; only the weights of `_type: local` are here"
        if wanted.version is not None:
            problem += (
                f". {wanted} is the model '{wanted.version.location}' of its backend: ask for that name. "
                "A language-model server sends it at /export/NAME"
            )
        raise RequestError(problem)
    require_local_extra()
    from etude.models.policy import LoraOptions, Policy

    base, name = str(llm.model), str(config.finetuning.target_model)
    if llm.tiny:
        require_whole(folder := base_folder(wanted.run, name))
        base = str(folder)
    else:
        with RunFolder.read(wanted.run) as run:
            require_base(run.journal, name, base)
    policy = Policy.load(base, **llm.loading)
    adapter = next(iter(config.trainer_adapters.values()), None)
    if wanted.version is None:
        return policy
    if isinstance(adapter, LocalAdapterConfig) and adapter.lora is not None:
        policy.use_lora(LoraOptions(**adapter.lora.model_dump()), seed=0)
    policy.keep_base()
    kept = wanted.folder
    location = wanted.version.location if kept is None else str(kept)
    policy.adopt(wanted.version.model_copy(update={"location": location}))
    if kept is not None and (damage := damage_in(kept)):
        _LOG.warning("the weights of %s are whole, and other files are not: %s", wanted, "; ".join(damage))
    return policy


def model_overrides(config: Config, text: str, wanted: RunVersion | None) -> list[str]:
    """Return the overrides that make `text` the target model: a folder, a name, or a version of a run.

    For a version they name the model that its run began from; its weights are adopted later. Raises
    RequestError when it is not clear which of the config's models is replaced, or its type does not fit.
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
        trained = base.llms.get(base.finetuning.target_model or "")
        if isinstance(trained, LocalLlmConfig) and isinstance(llm, LocalLlmConfig):
            name = str(base.finetuning.target_model)
            source = base_folder(wanted.run, name).absolute() if trained.tiny else trained.model
            return _replaced(target, llm, str(source))
        if trained is not None and trained.type_name == llm.type_name:
            return []
        raise RequestError(
            f"--model {text}: that run trained a model of another kind than llms.{target} "
            f"(`_type: {llm.type_name}`); use the run's own config"
        )
    if isinstance(llm, LocalLlmConfig):
        folder = local_path(text)
        return _replaced(target, llm, text if folder is None else str(folder.absolute()))
    if "model_name" in type(llm).model_fields:
        return [f"llms.{target}.model_name={json.dumps(text, ensure_ascii=False)}"]
    raise RequestError(f"--model: llms.{target} (`_type: {llm.type_name}`) has no key for a model's name")


def replaced_model(config: Config, wanted: RunVersion | None) -> str | None:
    """Return the entry of `llms` that the given model replaces, or None if that is not clear."""
    targets = config.finetuning.targets
    if wanted is not None and wanted.target in targets:
        return targets[wanted.target].model
    return config.finetuning.target_model


def _replaced(target: str, llm: LocalLlmConfig, source: str) -> list[str]:
    """Return the overrides with which a local model loads another one."""
    values = {"model": source} if llm.tiny is None else {"model": source, "tiny": None}
    return [f"llms.{target}.{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
