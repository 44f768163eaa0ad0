"""TensorBoard, MLflow and Weights & Biases (offline), each with a store that is read back."""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import EtudeError
from etude.show.tracker import TrackedRun
from etude.show.tracker_services import WandbConfig, WandbTracker
from tests.cli.projects import change, etude, run_to_end
from tests.support import needs


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


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB__DISABLE_STATS", "true")


def contents(file: Path) -> list[Any]:
    from wandb.proto.wandb_internal_pb2 import Record

    return [Record.FromString(entry) for entry in entries(file.read_bytes())]


def entries(content: bytes) -> Iterator[bytes]:
    """The entries of a `.wandb` file: a log of LevelDB's format. The package has no reader of its own."""
    position, parts = 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + 7])
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # A whole entry, or the end of one.
            yield parts
            parts = b""


def histories(file: Path) -> list[Any]:
    return [record.history for record in contents(file) if record.WhichOneof("record_type") == "history"]


def history(file: Path) -> list[dict[str, str]]:
    return [
        {item.key or "/".join(item.nested_key): item.value_json for item in row.item}
        for row in histories(file)
    ]


@needs("wandb")
@pytest.mark.slow
@pytest.mark.usefixtures("quiet")
def test_wandb_has_one_run_with_each_step_once(project, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    change(project / "config.yml", report="wandb")
    run_to_end("train", "config.yml", "--name", "one", folder=project)
    run_to_end("resume", "one", "-o", "finetuning.num_epochs=3", folder=project)
    first, second = sorted(Path("runs/one/wandb").glob("offline-run-*/run-*.wandb"))
    assert first.name == second.name  # By its id.
    assert [row.step.num for row in histories(first)] == [0, 1, 2, 3, 4]
    assert [row.step.num for row in histories(second)] == [5, 6, 7]
    rows = history(first)
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "2", "2"]
    assert "validation/avg_reward" in rows[0] and "train/reward_low" in rows[1]
    assert rows[1]["learner/loss"] in ("1", "1.0")
    assert "finetuning" in str([each.run.config for each in contents(first) if each.HasField("run")])


@needs("wandb")
@pytest.mark.usefixtures("quiet")
def test_a_server_of_wandb_that_is_away_is_named(project, monkeypatch):
    import wandb

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    wandb.teardown()  # It reads these once.
    with pytest.raises(EtudeError, match=r"no server .*http://127\.0\.0\.1:9"):
        WandbTracker(WandbConfig()).open(TrackedRun("one", project, "token", {}, {}))
    wandb.teardown()
