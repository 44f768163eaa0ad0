import json

import pytest

from etude.core.errors import StoreError
from etude.core.history import History
from etude.report.files import MetricsFiles
from tests.report.histories import NOW, epoch, history, validation


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_training_metrics_hold_every_number_of_every_epoch(tmp_path):
    MetricsFiles(tmp_path).write(History(run_id="run", epochs=(epoch(0, 0.5, training={"loss": 1.5}),)))
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
        MetricsFiles(tmp_path).write(history(rewards))
    assert [line["epoch"] for line in lines(tmp_path / "training_metrics.jsonl")] == [1, 2]


def test_epochs_that_changed_are_written_anew(tmp_path):
    whole, path, written = history([0.1, 0.2]), tmp_path / "training_metrics.jsonl", MetricsFiles(tmp_path)
    written.write(whole)
    changed = whole.epochs[0].model_copy(update={"metrics": {"avg_reward": 0.4}})
    written.write(whole.with_epoch(changed))
    assert [line["avg_reward"] for line in lines(path)] == [0.4, 0.2]
    written.write(whole.until(1))
    assert [line["epoch"] for line in lines(path)] == [1]
    path.write_text("of somebody else")
    written.write(whole.until(1))
    assert [line["epoch"] for line in lines(path)] == [1]
    path.unlink()
    written.write(whole.until(1))
    assert [line["epoch"] for line in lines(path)] == [1]


def test_the_lists_of_rewards_are_json_as_a_person_reads_it(tmp_path):
    MetricsFiles(tmp_path).write(history([0.1, 0.2]))
    text = (tmp_path / "reward_history.json").read_text()
    assert text == json.dumps(json.loads(text), indent=2) + "\n"
    MetricsFiles(tmp_path).write(History(run_id="run"))
    assert (tmp_path / "reward_history.json").read_text() == "[]\n"


def test_a_skipped_epoch_says_why(tmp_path):
    MetricsFiles(tmp_path).write(
        History(run_id="run", epochs=(epoch(0, 0.0, skipped="nothing to train on"),))
    )
    assert lines(tmp_path / "training_metrics.jsonl")[0]["skipped"] == "nothing to train on"


def test_reward_and_validation_history_have_the_fields_of_the_reference(tmp_path):
    rewards: dict[str, object] = {"min_reward": 0.0, "max_reward": 1.0, "reward_low": 0.4, "reward_high": 0.6}
    rewards["num_scored"] = 9
    rewards["evaluators"] = {"brief": {"mean": 0.25, "low": 0.1, "high": 0.4, "n": 9}}
    MetricsFiles(tmp_path).write(
        History(
            run_id="run",
            epochs=(epoch(0, 0.5, **rewards),),
            validations=(validation(0, 0.5, **rewards, num_unscored=1),),
        )
    )
    common = {"epoch": 1, "timestamp": NOW, "avg_reward": 0.5, **rewards}
    assert json.loads((tmp_path / "reward_history.json").read_text()) == [common | {"num_trajectories": 8}]
    assert json.loads((tmp_path / "validation_history.json").read_text()) == [
        common | {"epoch": 0, "num_examples": 10, "num_unscored": 1}
    ]


def test_numbers_that_are_not_finite_become_null(tmp_path):
    entry = epoch(0, 0.5, training={"kl": float("nan"), "steps": [float("inf"), 1.0]})
    MetricsFiles(tmp_path).write(History(run_id="run", epochs=(entry,)))
    text = (tmp_path / "training_metrics.jsonl").read_text()
    assert "NaN" not in text
    assert json.loads(text)["training"] == {"kl": None, "steps": [None, 1.0]}


def test_curriculum_state_is_written_only_for_a_curriculum(tmp_path):
    state = {"current_percentile": 0.3, "config": {"enabled": True}}
    off = {"current_percentile": 0.3, "config": {"enabled": False}}
    entry = epoch(0, 0.5).model_copy(update={"curriculum_state": off})
    MetricsFiles(tmp_path).write(History(run_id="run", epochs=(entry,)))
    assert not (tmp_path / "curriculum_state.json").exists()
    entry = epoch(0, 0.5).model_copy(update={"curriculum_state": state})
    MetricsFiles(tmp_path).write(History(run_id="run", epochs=(entry,)))
    assert json.loads((tmp_path / "curriculum_state.json").read_text()) == state


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        MetricsFiles(tmp_path / "file").write(history([0.1]))
