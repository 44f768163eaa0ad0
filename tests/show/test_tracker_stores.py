"""TensorBoard and MLflow, each with a store that is read back by its own reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.projects import change, etude


def train_and_go_on(project: Path, report: Any) -> None:
    """A run of two epochs, and one more epoch in another process."""
    change(project / "config.yml", report=report)
    assert etude("train", "config.yml", "--name", "one").exit_code == 0
    assert etude("resume", "one", "-o", "finetuning.num_epochs=3").exit_code == 0


def test_tensorboard_has_one_run_with_each_step_once(project):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_and_go_on(project, "tensorboard")
    folder = Path("runs/one/tensorboard")
    assert len(list(folder.iterdir())) == 2
    events = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    for name, steps in (("train/avg_reward", [1, 2, 3]), ("validation/reward_low", [0, 2, 3])):
        assert [each.step for each in events.Scalars(name)] == steps
    assert b"finetuning.num_epochs" in events.Tensors("config")[-1].tensor_proto.string_val[0]


def test_mlflow_has_one_run_with_each_step_once(project, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{project}/mlflow.db")
    train_and_go_on(project, {"_type": "mlflow", "experiment": "test"})
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("test")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    for name, steps in (
        ("train/avg_reward", [1, 2, 3]),
        ("learner/loss", [1, 2, 3]),
        ("validation/reward_low", [0, 2, 3]),
        ("total/tokens", [2, 3]),
    ):
        assert [each.step for each in client.get_metric_history(run.info.run_id, name)] == steps
    assert run.data.params["finetuning.num_epochs"] == "2"
    assert run.data.tags["code.etude"]
