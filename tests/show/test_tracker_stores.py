"""MLflow and Trackio, each with a store of its own that is read back by itself."""

from __future__ import annotations

import secrets
from typing import Any

import pytest

from tests.cli.projects import change, etude, succeed

pytestmark = pytest.mark.trackers


def only_run(uri: str) -> Any:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("test")
    (run,) = client.search_runs([experiment.experiment_id])
    return client, run


def test_mlflow_has_one_run_with_each_step_once(project, monkeypatch):
    pytest.importorskip("mlflow")
    uri = f"sqlite:///{project}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    change(project / "config.yml", report={"_type": "mlflow", "experiment": "test"})
    assert etude("train", "config.yml", "--name", "one").exit_code == 0
    assert etude("resume", "one", "-o", "finetuning.num_epochs=3").exit_code == 0
    client, run = only_run(uri)
    assert run.info.status == "FINISHED"
    steps = {
        name: [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
        for name in ("train/avg_reward", "learner/loss", "validation/reward_low", "total/tokens")
    }
    assert steps["train/avg_reward"] == steps["learner/loss"] == [1, 2, 3]
    assert steps["validation/reward_low"] == [0, 2, 3]
    assert steps["total/tokens"] == [2, 3]
    assert run.data.params["finetuning.num_epochs"] == "2"
    assert run.data.tags["code.etude"]


def test_trackio_has_one_run_with_each_record_once(project, monkeypatch):
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    name_of_project = f"etude-{secrets.token_hex(4)}"
    change(project / "config.yml", report={"_type": "trackio", "project": name_of_project})
    trained = succeed("train", "config.yml", "--name", "one", "--json")
    assert all(line.startswith("{") for line in trained.stdout.splitlines())
    assert etude("resume", "one", "-o", "finetuning.num_epochs=3").exit_code == 0
    (name,) = SQLiteStorage.get_runs(name_of_project)
    logs = SQLiteStorage.get_logs(name_of_project, name)
    assert [log["record"].partition("/")[0] for log in logs] == [
        *("validation", "epoch", "epoch", "validation", "finished"),
        *("epoch", "validation", "finished"),
    ]
    assert [log["step"] for log in logs if "train/avg_reward" in log] == [1, 2, 3]
