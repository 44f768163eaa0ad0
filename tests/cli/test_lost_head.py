"""A run whose machine is lost: killed at any moment, its folder gone, resumed from its storage.

Tests of S3 need `pip install s3fs 'moto[s3]' flask flask-cors`, and `pytest -m s3`.
"""

import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import etude
from tests.cli.killed import everything, killed_after
from tests.cli.projects import change, events, process, run_to_end, succeed, train_two_models


@pytest.fixture
def backed_up(deterministic: Path) -> Path:
    """A project whose runs are copied to a folder beside them."""
    storage = {"address": f"file://{deterministic}/storage", "interval": 0.05}
    change(deterministic / "config.yml", storage=storage)
    return deterministic


def whole_run(folder: Path, *command: str) -> tuple[int, dict[str, Any]]:
    """How many events a run has that nothing happens to, and all that it keeps."""
    whole = succeed(*command, "-o", "storage=null", "--json")
    expected = everything(folder / "runs" / "run")
    (folder / "runs").rename(folder / "whole")
    return len(events(whole.stdout)), expected


def check_losses(folder: Path, losses: int, seed: int, *resume: str) -> None:
    """`resume` is the address of the storage, with options; of the folder's own if it is left out."""
    command = begin = ["train", "config.yml", "--name", "run"]
    (count, expected), choice = whole_run(folder, *command), random.Random(seed)
    again = ["resume", *(resume or (f"file://{folder}/storage/run",))]
    for _ in range(losses):
        events_seen, seconds = choice.randint(2, count - 2), choice.random() * 0.1
        is_killed = killed_after(events_seen, *command, folder=folder, seconds=seconds)
        if not (folder / "runs").exists():
            command = begin  # It was lost before the first backup.
            continue
        shutil.rmtree(folder / "runs")
        command = again
        if not is_killed:
            break
    succeed(*command)
    assert everything(folder / "runs" / "run") == expected
    # And the backup has all of it.
    shutil.rmtree(folder / "runs")
    succeed(*again)
    assert everything(folder / "runs" / "run") == expected


def test_a_run_whose_machine_is_lost_twice_ends_as_one_that_was_not(backed_up):
    change(backed_up / "config.yml", finetuning__num_epochs=2)
    check_losses(backed_up, losses=2, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_a_run_whose_machine_is_lost_many_times_ends_as_one_that_was_not(backed_up, seed):
    check_losses(backed_up, losses=6, seed=seed)


@pytest.mark.slow
def test_a_run_that_trains_two_models_comes_back_with_both(backed_up, base):
    train_two_models(backed_up, base)
    check_losses(backed_up, losses=3, seed=1)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of an S3 server with an empty bucket; its credentials are in the environment."""
    s3fs, moto = pytest.importorskip("s3fs"), pytest.importorskip("moto.server")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    s3fs.S3FileSystem(client_kwargs={"endpoint_url": url}, skip_instance_cache=True).mkdir("bucket")
    yield url
    server.stop()


@pytest.mark.s3
def test_a_run_whose_machine_is_lost_goes_on_from_s3(deterministic: Path, s3: str) -> None:
    options = {"client_kwargs": {"endpoint_url": s3}}
    storage = {"address": "s3://bucket/etude", "interval": 0.05, "options": options}
    change(deterministic / "config.yml", storage=storage)
    there = ("s3://bucket/etude/run", "-o", f"storage.options.client_kwargs.endpoint_url={s3}")
    check_losses(deterministic, 2, 1, *there)


def test_an_evaluation_whose_machine_is_lost_is_gone_on_with_from_python(backed_up):
    command = ("evaluate", "config.yml", "--name", "run", "--repeat", "3")
    _, expected = whole_run(backed_up, *command)
    running = process(*command, folder=backed_up)
    while running.poll() is None and not list((backed_up / "storage").glob("run/run.tar.gz")):
        time.sleep(0.01)
    running.kill()
    running.communicate()
    shutil.rmtree(backed_up / "runs")
    run = etude.resume(f"file://{backed_up}/storage/run", progress=False)
    assert everything(run.folder) == expected


@pytest.mark.slow
def test_a_run_that_another_folder_goes_on_with_is_told_and_not_resumed(backed_up):
    change(backed_up / "config.yml", finetuning__num_epochs=1000)
    older = process("train", "config.yml", "--name", "run", "--json", folder=backed_up)
    for _ in range(40):
        older.stdout.readline()
    address = f"file://{backed_up}/storage/run"
    few = ["-o", "finetuning.num_epochs=3"]
    newer = run_to_end("resume", address, *few, "--output-dir", "other", "--json", folder=backed_up)
    older.kill()
    older.communicate()
    assert json.loads(newer.stdout.splitlines()[0])["event"] == "restored"
    again = run_to_end("resume", "run", folder=backed_up, code=1)
    assert "another folder has" in again.stderr
