"""The secrets of a config: found wherever they stand, not kept, and read again from its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.config.load import load_config, resolved_yaml, secrets_of
from etude.core.errors import ConfigError
from etude.core.secrets import MASK, masked

HELPER = {
    "_type": "openai",
    "model_name": "m",
    "base_url": "http://localhost:1/v1",
    "api_key": "canary-key-1",
    "headers": {"X-Team": "canary-header-2"},
    "extra_body": {"provider": {"token": "canary-body-3", "order": ["a"]}, "seed_key": "plain"},
}
ARGUMENTS = {
    "service": {"password": "canary-argument-4", "pad_token": "<|pad|>"},
    "database": "postgres://me:canary-address-5@host/db",
    "answer_key": "final_answer",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "an_agent.py").write_text("async def play(example, episode, **settings):\n    return ''\n")
    data = {
        "llms": {"helper": HELPER},
        "workflow": {"_type": "function", "function": "an_agent:play", "arguments": ARGUMENTS},
    }
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(data))
    return path


def test_they_are_masked_wherever_they_stand_and_nothing_else_is(config: Path):
    kept: dict[str, Any] = yaml.safe_load(resolved_yaml(load_config(config)))
    assert "canary" not in str(kept)
    helper, arguments = kept["llms"]["helper"], kept["workflow"]["arguments"]
    assert helper["extra_body"] == {"provider": {"token": MASK, "order": ["a"]}, "seed_key": "plain"}
    assert arguments == ARGUMENTS | {
        "service": {"password": MASK, "pad_token": "<|pad|>"},
        "database": MASK,
    }


def test_what_is_kept_loads_as_the_same_config_where_the_file_is_still_there(config: Path, tmp_path: Path):
    whole = load_config(config)
    kept = tmp_path / "kept.yml"
    kept.write_text(resolved_yaml(whole))
    again = load_config(kept)
    data = [each.model_dump(mode="json", fallback=str) for each in (whole, again)]
    assert secrets_of(again, data[1]) == secrets_of(whole, data[0])
    config.unlink()
    with pytest.raises(ConfigError, match=r"give it again: -o workflow\.arguments\.service\.password=…"):
        load_config(kept)


def test_from_then_on_they_are_masked_in_all_text(config: Path):
    load_config(config)
    assert masked("canary-body-3, canary-address-5 and canary-header-2") == f"{MASK}, {MASK} and {MASK}"


def test_a_config_that_is_wrong_tells_none(config: Path):
    config.write_text(config.read_text().replace("model_name: m", "model_name: canary-key-1\n    top_p: 5"))
    with pytest.raises(ConfigError) as caught:
        load_config(config)
    assert "canary" not in str(caught.value)


def test_references_stay_but_for_defaults_that_are_secret(config: Path, monkeypatch: pytest.MonkeyPatch):
    text = config.read_text().replace("canary-key-1", "${HELPER_KEY:-canary-default-6}")
    config.write_text(text.replace("canary-header-2", "of ${HELPER_KEY}"))
    monkeypatch.setenv("HELPER_KEY", "canary-set-7")
    kept = yaml.safe_load(resolved_yaml(load_config(config)))["llms"]["helper"]
    assert kept["api_key"] == MASK and kept["headers"] == {"X-Team": "of ${HELPER_KEY}"}
