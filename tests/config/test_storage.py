"""The `storage` block: an address or a mapping, without secrets in what is kept."""

from __future__ import annotations

import pytest
import yaml

from etude.config.load import parse_config, resolved_yaml
from etude.core.errors import ConfigError
from etude.loop.lifecycle import config_to_resume, storage_options
from etude.store.stored_config import config_text


def stored(storage: object) -> object:
    return yaml.safe_load(resolved_yaml(parse_config({"storage": storage})))["storage"]


def test_an_address_alone_is_a_whole_block():
    config = parse_config({"storage": "s3://bucket/etude/"}).storage
    assert config is not None
    assert (config.address, config.interval) == ("s3://bucket/etude", 60)
    assert stored("s3://bucket/etude")["address"] == "s3://bucket/etude"
    assert parse_config({}).storage is None


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("/mnt/backup", r"an address begins with its scheme, as in file:///mnt/backup"),
        ("bucket/etude", "as in file:///mnt/backup, s3://bucket/etude"),
        ("sftp://me:secret@host/etude", r"no password in an address"),
        ({"address": "s3://b", "intervall": 1}, "did you mean 'interval'"),
        ({"address": "s3://b", "interval": 0}, "> 0"),
    ],
)
def test_what_is_no_storage_is_refused(storage, words):
    with pytest.raises(ConfigError, match=words) as raised:
        parse_config({"storage": storage})
    assert "secret" not in str(raised.value)


def test_secrets_are_not_kept_and_reach_the_driver(monkeypatch):
    monkeypatch.setenv("MINIO_SECRET", "from the environment")
    options = {
        "key": "written out",
        "secret": "${MINIO_SECRET}",
        "client_kwargs": {"endpoint_url": "http://minio:9000", "aws_session_token": "deep"},
        "anon": False,
    }
    storage = {"address": "s3://bucket", "options": options}
    config = parse_config({"storage": storage})
    text = resolved_yaml(config) + repr(config)
    assert "written out" not in text and "deep" not in text and "from the environment" not in text
    kept = stored(storage)["options"]
    assert kept["secret"] == "${MINIO_SECRET}"
    assert kept["client_kwargs"]["endpoint_url"] == "http://minio:9000"
    assert config.storage.driver_options() == {
        "key": "written out",
        "secret": "from the environment",
        "client_kwargs": {"endpoint_url": "http://minio:9000", "aws_session_token": "deep"},
        "anon": False,
    }


def test_options_for_a_storage_that_holds_the_config_come_from_the_command_line():
    options = storage_options(["storage.options.anon=true", "finetuning.num_epochs=3", "storage.interval=5"])
    assert options == {"anon": True}


def test_a_run_may_go_on_with_other_options_and_another_storage(tmp_path):
    yaml = resolved_yaml(parse_config({"storage": "s3://bucket"}))
    (tmp_path / "config.yml").write_text(config_text(yaml))
    change = ["storage.options.client_kwargs.endpoint_url=http://minio:9000", "storage.interval=5"]
    storage = config_to_resume(tmp_path, change).storage
    assert storage.options == {"client_kwargs": {"endpoint_url": "http://minio:9000"}}
    assert storage.interval == 5
    assert config_to_resume(tmp_path, ["storage=null"]).storage is None
