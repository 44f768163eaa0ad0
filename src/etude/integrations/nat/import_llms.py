"""The block `llms` of a NeMo Agent Toolkit config."""

from __future__ import annotations

from typing import Any

from etude.integrations.art.config import ArtBackendConfig
from etude.integrations.nat.import_notes import Notes
from etude.integrations.nat.llms import OPENAI_LIKE, SAME, endpoint, plain_type

Json = dict[str, Any]

_ART_PORT = 8000
"""Where an ART server serves its model, unless its config says otherwise."""


def llms_of(notes: Notes) -> dict[str, Json]:
    """All models, as endpoints that speak OpenAI's API."""
    return {name: _llm(name, notes.block("llms", name), notes) for name in notes.block("llms")}


def serve_by_art(llm: Json, adapter: Json) -> Json:
    """The model that an ART server trains: sampled there, by the server's name, with the tokens' ids."""
    backend = adapter["backend"]
    host = backend.get("ip") or "localhost"
    # ART's clients take an endpoint without a key to have this one.
    key = llm.get("api_key") or backend.get("api_key") or "default"
    address = llm.get("base_url") or f"http://{host}:{_ART_PORT}/v1"
    sampling = {name: value for name, value in llm.items() if name != "logprobs"}
    name = backend.get("name", ArtBackendConfig.model_fields["name"].default)
    return sampling | {"model_name": name, "base_url": address, "api_key": key, "provider": "vllm"}


def _llm(name: str, llm: Json, notes: Notes) -> Json:
    kind, path = str(llm.get("_type")), ("llms", name)
    if plain_type(kind) not in OPENAI_LIKE:
        notes.add(
            path, f"`_type: {kind}` became `openai`; give the address of an endpoint that speaks OpenAI's API"
        )
    found = endpoint(name, llm)
    if not found.get("logprobs", True):
        notes.add((*path, "logprobs"), "left out: the sampled tokens' logprobs are what GRPO trains on")
        del found["logprobs"]
    said = "left out; fields that the endpoint wants with each request go into `extra_body`"
    notes.unmapped(path, llm, [*SAME, "model_name", "model"], said)
    return found
