"""A run at a real MLflow server on loopback, which goes away and comes back."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.projects import change, etude, finished

pytest.importorskip("mlflow.server", reason="`mlflow server` is in mlflow, and not in mlflow-skinny")
pytestmark = [pytest.mark.trackers, pytest.mark.slow]

_SECONDS_TO_START = 300.0


class Server:
    """`mlflow server` over a database and a folder, on one port however often it is started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        options += ["--artifacts-destination", str(self.folder / "artifacts")]
        options += ["--workers", "1", "--host", "127.0.0.1", "--port", str(self.port)]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *options],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until = time.monotonic() + _SECONDS_TO_START
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < until, (self.folder / "log").read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, 15)
            self._process.wait(timeout=60)
            self._process = None

    def runs(self) -> tuple[Any, list[Any]]:
        """A client, and the runs of the experiment `test`."""
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri=self.url)
        return client, client.search_runs([client.get_experiment_by_name("test").experiment_id])

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tmp_path_factory.mktemp("mlflow"))
    started.start()
    yield started
    started.stop()


@pytest.fixture
def server(database: Server) -> Server:
    """The server, without the experiments of other tests."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=database.url)
    for each in client.search_experiments(filter_string="name = 'test'"):
        client.rename_experiment(each.experiment_id, f"{each.name}-{each.experiment_id}")
    return database


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


def steps_of(client: Any, run: Any, *names: str) -> list[list[int]]:
    return [[metric.step for metric in client.get_metric_history(run.info.run_id, name)] for name in names]


def test_a_server_has_figures_parameters_and_tables_of_a_run(local, base, server):
    report = {"_type": "mlflow", "tracking_uri": server.url, "experiment": "test"}
    change(local / "config.yml", report=report | {"patience": 300}, finetuning__num_epochs=1)
    trained = finished("train", "config.yml", "--name", "one", "--json", folder=local)
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert all(line.startswith("{") for line in trained.stdout.splitlines())
    resumed = finished("resume", "one", "-o", "finetuning.num_epochs=2", folder=local)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    client, (run,) = server.runs()
    assert run.info.status == "FINISHED"
    assert run.data.params["trainer_adapters.local.learning_rate"] == "0.003"
    names = ("train/avg_reward", "train/reward_low", "learner/loss", "validation/avg_reward")
    assert steps_of(client, run, *names) == [[1, 2], [1, 2], [1, 2], [0, 1, 2]]
    here = Path(client.download_artifacts(run.info.run_id, "", str(local)))
    table = json.loads((here / "episodes/epoch-000002.json").read_text())
    assert table["columns"][:2] == ["episode", "example"] and len(table["data"]) == 8


def test_a_server_that_goes_away_gets_what_it_missed_when_it_is_back(project, server):
    report = {"_type": "mlflow", "tracking_uri": server.url, "experiment": "test"}
    change(project / "config.yml", report=report | {"patience": 300})
    assert etude("train", "config.yml", "--name", "one").exit_code == 0
    server.stop()
    hasty = json.dumps([report | {"patience": 0.5}])
    resumed = etude("resume", "one", "-o", "finetuning.num_epochs=3", "-o", f"report={hasty}")
    assert resumed.exit_code == 0, resumed.stdout
    assert "4 of 7 records" in resumed.stdout and "nobody answers at" in resumed.stdout
    away = etude("report", "one", "--wait", "0.5")
    assert away.exit_code == 1 and "next: etude report runs/one" in away.stderr
    server.start()
    sent = etude("report", "one")
    assert sent.exit_code == 0, sent.stdout + sent.stderr
    client, (run,) = server.runs()
    names = ("train/avg_reward", "learner/loss", "validation/avg_reward", "total/tokens")
    assert steps_of(client, run, *names) == [[1, 2, 3], [1, 2, 3], [0, 2, 3], [2, 3]]
    assert run.info.status == "FINISHED"
