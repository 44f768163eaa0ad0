"""The model of a stored run with the weights of one of its versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etude.backends.local_config import LocalAdapterConfig
from etude.config.schema import Config
from etude.core.errors import RequestError
from etude.inference.local import LocalLlmConfig, require_local_extra
from etude.store.stored_config import model_config
from etude.store.versions import RunVersion, stored_at

if TYPE_CHECKING:
    from etude.models.policy import Policy


def load_version(wanted: RunVersion) -> Policy:
    """The policy of a run's local model, with the weights of `wanted`, on the device of its config.

    Raises RequestError when the run's model is not local, MissingExtraError without torch, EngineError
    when the weights are not those that the run recorded.
    """
    config = model_config(wanted.run, wanted.target)
    llm = local_model(config, wanted)
    require_local_extra()
    from etude.models.policy import LoraOptions, Policy

    policy = Policy.load(llm.model, device=llm.device, dtype=llm.dtype)
    adapter = next(iter(config.trainer_adapters.values()), None)
    if wanted.version is None:
        return policy
    if isinstance(adapter, LocalAdapterConfig) and adapter.lora is not None:
        modules = adapter.lora.target_modules
        policy.use_lora(
            LoraOptions(adapter.lora.r, adapter.lora.alpha, tuple(modules) if modules else None), seed=0
        )
    policy.keep_base()
    place = stored_at(wanted.run, wanted.version)
    location = wanted.version.location if place is None else str(place)
    policy.adopt(wanted.version.model_copy(update={"location": location}))
    return policy


def local_model(config: Config, wanted: RunVersion) -> LocalLlmConfig:
    """The config of the trained model. Raises RequestError when it does not run in this process."""
    name = config.finetuning.target_model
    llm = config.llms.get(name) if name is not None else None
    if not isinstance(llm, LocalLlmConfig):
        kind = "of no known type" if llm is None else f"`_type: {llm.type_name}`"
        told = f"the model of run {wanted.run.name} is {kind}; only the weights of `_type: local` are here"
        if wanted.version is not None:
            told += f". {wanted} is the model '{wanted.version.location}' of its backend: ask for that name"
        raise RequestError(told)
    return llm
