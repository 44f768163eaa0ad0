"""Entries of the toolkit's `llms`."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from etude.core.errors import RequestError
from etude.integrations.nat.run import endpoint, run_here, trained_model

LLMS = {
    "policy": SimpleNamespace(model_name="Qwen/Qwen2.5-0.5B-Instruct"),
    "judge": SimpleNamespace(model_name="gpt-4o"),
}


@pytest.mark.parametrize("wanted", ["policy", "Qwen/Qwen2.5-0.5B-Instruct"])
def test_the_trained_model_is_named_by_its_entry_or_by_its_model(wanted):
    assert trained_model(LLMS, wanted) == "policy"


@pytest.mark.parametrize(("wanted", "told"), [(None, "finetuning.target_model"), ("policy-2", "judge")])
def test_what_does_not_tell_which_is_trained_is_refused(wanted, told):
    with pytest.raises(RequestError, match=told):
        trained_model(LLMS, wanted)


def test_what_an_endpoint_says_of_sampling_is_kept_and_where_it_is_is_not_for_a_model_here():
    written = {
        "_type": "nat/openai",
        "model_name": "base",
        "temperature": 0.7,
        "seed": 3,
        "base_url": "http://x",
    }
    assert endpoint("policy", written) == {
        "_type": "openai",
        "model_name": "base",
        "temperature": 0.7,
        "base_url": "http://x",
    }
    assert run_here(endpoint("policy", written)) == {"_type": "local", "model": "base", "temperature": 0.7}


def test_nvidias_endpoint_has_its_address_and_key():
    found = endpoint("policy", {"_type": "nim", "model_name": "meta/llama"})
    assert found["base_url"].startswith("https://integrate.api.nvidia.com")
    assert found["api_key"] == "${NVIDIA_API_KEY}"
