"""The trainer adapter for ART servers, `_type: openpipe_art`. Importing this module only registers it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from etude.config.registry import register_trainer_adapter
from etude.core.errors import CapabilityError
from etude.integrations.art.config import ARTTrainerAdapterConfig

if TYPE_CHECKING:
    from etude.config.builder import Builder
    from etude.integrations.art.adapter import ARTTrainerAdapter


@register_trainer_adapter(config_type=ARTTrainerAdapterConfig)
async def openpipe_art(config: ARTTrainerAdapterConfig, builder: Builder) -> AsyncIterator[ARTTrainerAdapter]:
    """Build the adapter for the run's target model.

    Raises CapabilityError if the model's endpoint or the trajectory builder does not suit ART: ART needs
    token ids and logprobs, and one reward for a whole trajectory.
    """
    from etude.backends.trainer_adapter import trained_model
    from etude.engines.openai_compatible import OpenAiLlmConfig
    from etude.integrations.art.adapter import ARTTrainerAdapter
    from etude.integrations.art.client import ArtInference

    llm = trained_model(builder, "openpipe_art", OpenAiLlmConfig)
    target = str(builder.config.finetuning.target_model)
    if llm.base_url is None:
        raise CapabilityError(
            f"llms.{target} has no 'base_url', and would be sampled from OpenAI; give it the address where "
            "the ART server serves the model (http://HOST:8000/v1, where nothing else is set)"
        )
    if not llm.asks_for_logprobs or not llm.asks_for_token_ids:
        raise CapabilityError(
            f"ART trains on sampled tokens and their logprobs, and llms.{target} does not ask for them; set "
            "'provider: vllm' there, which is what an ART server samples with"
        )
    name = builder.config.finetuning.trajectory_builder
    if getattr(builder.config.trajectory_builders.get(name or ""), "credit", None) == "turn":
        raise CapabilityError(
            f"trajectory_builders.{name} has 'credit: turn', which gives each answer a reward of its own, "
            "and ART takes one for a whole trajectory; use 'credit: agent' or 'episode'"
        )
    inference = ArtInference(llm.address, (llm.api_key or config.backend.api_key).get_secret_value())
    log = None if builder.run is None else builder.run.path / "openpipe_art_jobs.jsonl"
    engine = await builder.get_llm(target)
    adapter = ARTTrainerAdapter(
        config, engine=engine, inference=inference, folder=builder.checkpoints, log=log
    )
    try:
        yield adapter
    finally:
        await adapter.cleanup()
