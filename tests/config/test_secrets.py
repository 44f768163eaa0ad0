"""The secrets of a config and its `storage`: found wherever they stand, and not kept."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.config.load import find_secrets, load_config, parse_config, resolved_yaml
from etude.core.errors import ConfigError
from etude.core.secrets import MASK, mask_secrets
from etude.loop.lifecycle import config_to_resume, storage_options
from etude.store.run_folder import RunFolder

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
    "vault": {"password": 4815162342, "client_secret": "90210421337788", "token_limit": 10_000_000},
}
KEPT = {
    "service": {"password": MASK, "pad_token": "<|pad|>"},
    "database": MASK,
    "vault": {"password": MASK, "client_secret": MASK, "token_limit": 10_000_000},
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
    assert arguments == ARGUMENTS | KEPT


def test_what_is_kept_loads_as_the_same_config_where_the_file_is_still_there(config: Path, tmp_path: Path):
    whole = load_config(config)
    kept = tmp_path / "kept.yml"
    kept.write_text(resolved_yaml(whole))
    again = load_config(kept)
    data = [each.model_dump(mode="json", fallback=str) for each in (whole, again)]
    assert find_secrets(again, data[1]) == find_secrets(whole, data[0])
    config.unlink()
    with pytest.raises(ConfigError, match=r"set it again: -o workflow\.arguments\.service\.password=…"):
        load_config(kept)


def test_from_then_on_they_are_masked_in_all_text(config: Path):
    load_config(config)
    assert mask_secrets("canary-body-3, canary-address-5, canary-header-2") == f"{MASK}, {MASK}, {MASK}"
    assert mask_secrets("4815162342 of 10000000") == f"{MASK} of 10000000"


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


def resolve(storage: object) -> object:
    return yaml.safe_load(resolved_yaml(parse_config({"storage": storage})))["storage"]


def test_an_address_alone_is_a_whole_block():
    config = parse_config({"storage": "s3://bucket/etude/"}).storage
    assert config is not None
    assert (config.address, config.interval) == ("s3://bucket/etude", 60)
    assert resolve("s3://bucket/etude")["address"] == "s3://bucket/etude"
    assert parse_config({}).storage is None


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("/mnt/backup", r"scheme, as in file:///mnt/backup"),
        ("bucket/etude", "as in file:///mnt/backup, s3://bucket/etude"),
        ("sftp://me:secret@host/etude", r"no password in"),
        ({"address": "s3://b", "intervall": 1}, "did you mean 'interval'"),
        ({"address": "s3://b", "interval": 0}, "greater than 0"),
    ],
)
def test_what_is_no_storage_is_refused(storage, words):
    with pytest.raises(ConfigError, match=words) as raised:
        parse_config({"storage": storage})
    assert "secret" not in str(raised.value)


def test_secrets_are_not_kept_and_reach_the_driver(monkeypatch):
    monkeypatch.setenv("MINIO_SECRET", "from the environment")
    options = {
        "key": "AKIA5EXAMPLE77ABCDEF",
        "secret": "${MINIO_SECRET}",
        "client_kwargs": {"endpoint_url": "http://minio:9000", "aws_session_token": "deep in it"},
        "anon": False,
    }
    storage = {"address": "s3://bucket", "options": options}
    config = parse_config({"storage": storage})
    text = resolved_yaml(config) + mask_secrets(repr(config))
    assert not any(word in text for word in ("AKIA5", "deep in it", "from the environment"))
    kept = resolve(storage)["options"]
    assert kept["secret"] == "${MINIO_SECRET}"
    assert kept["client_kwargs"]["endpoint_url"] == "http://minio:9000"
    assert config.storage.options == options | {"secret": "from the environment"}


def test_options_for_a_storage_that_holds_the_config_come_from_the_command_line():
    options = storage_options(["storage.options.anon=true", "finetuning.num_epochs=3", "storage.interval=5"])
    assert options == {"anon": True}


def test_a_run_may_go_on_with_other_options_and_another_storage(tmp_path):
    yaml = resolved_yaml(parse_config({"storage": "s3://bucket"}))
    with RunFolder.create(tmp_path, "r", config=yaml) as run:
        path = run.path
    change = ["storage.options.client_kwargs.endpoint_url=http://minio:9000", "storage.interval=5"]
    storage = config_to_resume(path, change).storage
    assert storage.options == {"client_kwargs": {"endpoint_url": "http://minio:9000"}}
    assert storage.interval == 5
    assert config_to_resume(path, ["storage=null"]).storage is None
