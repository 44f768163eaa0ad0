import json

import pytest

from etude.core.errors import StoreError
from etude.core.history import History
from etude.report.files import write_metrics_files
from tests.report.histories import NOW, epoch, history, validation


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_metrics_hold_every_number_of_every_epoch(tmp_path):
    write_metrics_files(History(run_id="run", epochs=(epoch(0, 0.5, training={"loss": 1.5}),)), tmp_path)
    assert lines(tmp_path / "training_metrics.jsonl") == [
        {
            "epoch": 1,
            "timestamp": NOW,
            "run_id": "run",
            "avg_reward": 0.5,
            "num_trajectories": 8,
            "training": {"loss": 1.5},
        }
    ]


def test_writing_again_leaves_no_line_twice(tmp_path):
    for rewards in ([0.1], [0.1, 0.2], [0.1, 0.2]):
        write_metrics_files(history(rewards), tmp_path)
    assert [line["epoch"] for line in lines(tmp_path / "training_metrics.jsonl")] == [1, 2]


def test_a_skipped_epoch_says_why(tmp_path):
    write_metrics_files(
        History(run_id="run", epochs=(epoch(0, 0.0, skipped="nothing to train on"),)), tmp_path
    )
    assert lines(tmp_path / "training_metrics.jsonl")[0]["skipped"] == "nothing to train on"


def test_reward_and_validation_history_have_the_fields_of_the_reference(tmp_path):
    rewards: dict[str, object] = {"min_reward": 0.0, "max_reward": 1.0, "reward_low": 0.4, "reward_high": 0.6}
    rewards["num_scored"] = 9
    rewards["evaluators"] = {"brief": {"mean": 0.25, "low": 0.1, "high": 0.4, "n": 9}}
    write_metrics_files(
        History(
            run_id="run",
            epochs=(epoch(0, 0.5, **rewards),),
            validations=(validation(0, 0.5, **rewards, num_unscored=1),),
        ),
        tmp_path,
    )
    common = {"epoch": 1, "timestamp": NOW, "avg_reward": 0.5, **rewards}
    assert json.loads((tmp_path / "reward_history.json").read_text()) == [common | {"num_trajectories": 8}]
    assert json.loads((tmp_path / "validation_history.json").read_text()) == [
        common | {"epoch": 0, "num_examples": 10, "num_unscored": 1}
    ]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    entry = epoch(0, 0.5, training={"kl": float("nan"), "steps": [float("inf"), 1.0]})
    write_metrics_files(History(run_id="run", epochs=(entry,)), tmp_path)
    text = (tmp_path / "training_metrics.jsonl").read_text()
    assert "NaN" not in text
    assert json.loads(text)["training"] == {"kl": None, "steps": [None, 1.0]}


def test_curriculum_state_is_written_only_for_a_curriculum(tmp_path):
    state = {"current_percentile": 0.3, "config": {"enabled": True}}
    off = {"current_percentile": 0.3, "config": {"enabled": False}}
    entry = epoch(0, 0.5).model_copy(update={"curriculum_state": off})
    write_metrics_files(History(run_id="run", epochs=(entry,)), tmp_path)
    assert not (tmp_path / "curriculum_state.json").exists()
    entry = epoch(0, 0.5).model_copy(update={"curriculum_state": state})
    write_metrics_files(History(run_id="run", epochs=(entry,)), tmp_path)
    assert json.loads((tmp_path / "curriculum_state.json").read_text()) == state


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        write_metrics_files(history([0.1]), tmp_path / "file")
