"""Backups to S3 over its wire, at a server of the test's own.

`pip install s3fs 'moto[s3]' flask flask-cors` and `pytest -m s3`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cli.killed import everything, killed_after
from tests.cli.projects import change, finished, local_project

pytestmark = pytest.mark.s3
PLACE = "s3://bucket/etude/run"


@pytest.fixture(scope="module", autouse=True)
def packages() -> None:
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")


@pytest.fixture
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The options of the driver for a server with an empty bucket; credentials are in the environment."""
    import s3fs
    from moto.server import ThreadedMotoServer

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"client_kwargs": {"endpoint_url": f"http://{host}:{port}"}}
    # What an earlier server of this process was given.
    httpx.post(f"http://{host}:{port}/moto-api/reset").raise_for_status()
    s3fs.S3FileSystem(**options, skip_instance_cache=True).mkdir("bucket")
    yield options
    server.stop()


def test_a_killed_run_goes_on_from_s3_as_if_nothing_had_been(tmp_path, options, base):
    config = local_project(tmp_path, base)
    change(config, finetuning__deterministic=True, trainer_adapters__local__lora={"r": 4})
    whole = finished("train", "config.yml", "--name", "run", "--json", folder=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = everything(tmp_path / "runs" / "run")
    shutil.rmtree(tmp_path / "runs")
    change(config, storage={"address": "s3://bucket/etude", "interval": 0.05, "options": options})
    url = options["client_kwargs"]["endpoint_url"]
    resume = ["resume", PLACE, "-o", f"storage.options.client_kwargs.endpoint_url={url}"]
    command = ["train", "config.yml", "--name", "run"]
    for count in (20, 30):
        assert killed_after(count, *command, folder=tmp_path, seconds=0.1)
        shutil.rmtree(tmp_path / "runs")
        command = resume
    last = finished(*resume, folder=tmp_path)
    assert last.returncode == 0, last.stderr
    assert everything(tmp_path / "runs" / "run") == expected
