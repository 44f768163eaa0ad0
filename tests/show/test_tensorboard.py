"""TensorBoard's event files, read back by TensorBoard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.projects import change, etude

pytest.importorskip("tensorboard")


def read(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "images": 0})
    events.Reload()
    return events


def test_a_run_and_what_follows_it_are_one_run_of_tensorboard(project):
    change(project / "config.yml", report="tensorboard")
    assert etude("train", "config.yml", "--name", "one").exit_code == 0
    assert etude("resume", "one", "-o", "finetuning.num_epochs=3").exit_code == 0
    assert len(list(Path("runs/one/tensorboard").iterdir())) == 2
    events = read(Path("runs/one/tensorboard"))
    assert [each.step for each in events.Scalars("train/avg_reward")] == [1, 2, 3]
    assert [each.step for each in events.Scalars("validation/reward_low")] == [0, 2, 3]
    assert [each.step for each in events.Scalars("learner/loss")] == [1, 2, 3]
    config = events.Tensors("config")[-1]
    assert b"finetuning.num_epochs" in config.tensor_proto.string_val[0]
