"""Entries of the toolkit's `llms`, and what they are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.core.errors import RequestError

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

_NIM = {"base_url": "https://integrate.api.nvidia.com/v1", "api_key": "${NVIDIA_API_KEY}"}


def endpoint(name: str, llm: Mapping[str, Any]) -> Json:
    """An entry as an endpoint that speaks OpenAI's API; `name` is what it is called in `llms`."""
    entry: Json = {"_type": "openai", "model_name": llm.get("model_name") or llm.get("model") or name}
    entry |= {key: llm[key] for key in SAME if llm.get(key) is not None}
    # A package may stand before the type.
    is_nim = str(llm.get("_type")).rpartition("/")[2] == "nim"
    return _NIM | entry if is_nim else entry


def run_here(llm: Mapping[str, Any]) -> Json:
    """The model of an endpoint as one of this process."""
    kept: Json = {name: llm[name] for name in ("temperature", "top_p", "max_tokens") if name in llm}
    return {"_type": "local", "model": llm["model_name"], **kept}


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
