"""Entries of the toolkit's `llms`, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.core.errors import RequestError
from etude.integrations.art.config import ArtBackendConfig
from etude.integrations.nat.import_notes import Notes

Json = dict[str, Any]

SAME = (
    "base_url",
    "api_key",
    "temperature",
    "top_p",
    "max_tokens",
    "request_timeout",
    "max_retries",
    "logprobs",
    "top_logprobs",
)
"""Keys that mean the same here."""

OPENAI_LIKE = ("openai", "nim")
"""Types that are endpoints with OpenAI's API."""

_NIM = {"base_url": "https://integrate.api.nvidia.com/v1", "api_key": "${NVIDIA_API_KEY}"}

_ART_PORT = 8000
"""Where an ART server serves its model, unless its config says otherwise."""


def plain_type(written: Any) -> str:
    """A `_type` without the package that may stand before it."""
    return str(written).rpartition("/")[2]


def endpoint(name: str, llm: Mapping[str, Any]) -> Json:
    """An entry as an endpoint that speaks OpenAI's API; `name` is what it is called in `llms`."""
    entry: Json = {"_type": "openai", "model_name": llm.get("model_name") or llm.get("model") or name}
    entry |= {key: llm[key] for key in SAME if llm.get(key) is not None}
    return _NIM | entry if plain_type(llm.get("_type")) == "nim" else entry


def run_here(llm: Mapping[str, Any], model: str | None = None) -> Json:
    """The model of an endpoint as one of this process; `model` goes before its name."""
    kept: Json = {name: llm[name] for name in ("temperature", "top_p", "max_tokens") if name in llm}
    return {"_type": "local", "model": model or llm["model_name"], **kept}


def trained_model(llms: Mapping[str, Any], wanted: str | None) -> str:
    """The entry that is trained: by its name, by the name of its model, or because it is the only one.

    Raises RequestError when that does not tell.
    """
    if wanted is None or wanted in llms:
        return wanted or only_model(llms)
    named = [name for name, llm in llms.items() if getattr(llm, "model_name", None) == wanted]
    if len(named) != 1:
        raise RequestError(
            f"finetuning.target_model: there is no model '{wanted}' in `llms`; there are: {_listed(llms)}"
        )
    return named[0]


def only_model(llms: Mapping[str, Any]) -> str:
    """The name of the only entry. Raises RequestError when there are none or several."""
    if len(llms) != 1:
        raise RequestError(
            f"say which of `llms` is trained with `finetuning.target_model`; there are: {_listed(llms)}"
        )
    return next(iter(llms))


def _listed(llms: Mapping[str, Any]) -> str:
    return ", ".join(llms) or "none"


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
    entry = endpoint(name, llm)
    if not entry.get("logprobs", True):
        notes.add((*path, "logprobs"), "left out: the sampled tokens' logprobs are what GRPO trains on")
        del entry["logprobs"]
    message = "left out; fields that the endpoint wants with each request go into `extra_body`"
    notes.unmapped(path, llm, [*SAME, "model_name", "model"], message)
    return entry
