"""Where processes would be placed, told without a cluster."""

from __future__ import annotations

import pytest

from etude.cluster.config import Group, Node, RayConfig, placed


def nodes(*cpus: float) -> list[Node]:
    return [Node(str(number), f"10.0.0.{number}", {"CPU": each}) for number, each in enumerate(cpus, 1)]


def test_runners_are_spread_and_learners_take_what_they_leave_on_as_few_nodes_as_possible():
    there = nodes(2, 2, 4)
    runners = placed(Group("runners", 3, 3, {"CPU": 1.0}, spread=True), there)
    learners = placed(Group("learners", 3, 3, {"CPU": 1.0}), there)
    assert runners.detail.endswith("3 of 3 nodes of Ray: 10.0.0.1 (1), 10.0.0.2 (1), 10.0.0.3 (1)")
    assert learners.detail.endswith("1 of 3 nodes of Ray: 10.0.0.3 (3)")


def test_what_has_no_room_is_said_with_what_each_takes():
    lacking = placed(Group("learners", 3, 3, {"CPU": 2.0, "GPU": 1.0}), nodes(8, 8))
    assert not lacking.is_ready
    assert "room for 0 of 3 learners with {CPU: 2, GPU: 1} on 2 nodes; ask for fewer" in lacking.detail


def test_fewer_will_do_where_the_config_says_so():
    fewer = placed(Group("learners", 3, 2, {"CPU": 1.0}), nodes(1, 1))
    assert fewer.is_ready
    assert (
        "room for 2 of 3 learners" in fewer.detail
        and "and 2 will do: 10.0.0.1 (1), 10.0.0.2 (1)" in fewer.detail
    )


@pytest.mark.parametrize(
    ("gpus", "config", "on_gpus", "each"),
    [(4, {}, True, 1), (4, {}, False, 0), (0, {}, True, 0), (4, {"learner_gpus": 0.5}, True, 0.5)],
)
def test_a_learner_has_a_gpu_where_there_are_any(
    gpus: float, config: dict[str, float], on_gpus: bool, each: float
):
    room = RayConfig(learners=2, **config).learner_room({"CPU": 8, "GPU": gpus}, on_gpus=on_gpus)
    assert room.get("GPU", 0) == each
