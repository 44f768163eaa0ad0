import json

from etude.core.history import History
from etude.report.files import MetricsFiles
from tests.report.histories import NOW, epoch, history, validation


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


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
