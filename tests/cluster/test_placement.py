"""Whether processes have room, told without a cluster."""

from __future__ import annotations

import pytest

from etude.cluster.config import RayConfig, placed


@pytest.mark.parametrize(
    ("cpus", "count", "is_ready", "told"),
    [
        ((2, 2, 4), 3, True, "3 runners on 2 of 3 nodes"),
        ((0.5, 0.5), 1, False, "room for 0 of 1 runners with {CPU: 1} on 2 nodes; ask for fewer"),
    ],
)
def test_processes_have_room_or_not(cpus, count, is_ready, told):
    found = placed("runners", count, {"CPU": 1.0}, [{"CPU": each} for each in cpus])
    assert (found.is_ready, told in found.detail) == (is_ready, True)


@pytest.mark.parametrize(
    ("gpus", "config", "on_gpus", "each"),
    [(4, {}, True, 1), (4, {}, False, 0), (0, {}, True, 0), (4, {"learner_gpus": 0.5}, True, 0.5)],
)
def test_a_learner_has_a_gpu_where_there_are_any(
    gpus: float, config: dict[str, float], on_gpus: bool, each: float
):
    room = RayConfig(learners=2, **config).learner_room({"CPU": 8, "GPU": gpus}, on_gpus=on_gpus)
    assert room.get("GPU", 0) == each
