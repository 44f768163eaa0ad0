"""GPU hours are counted, or refused by name: never silently none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from etude.budget.gpus import gpus_held, require_counted
from etude.budget.prices import require_bounded
from etude.config.load import parse_config
from etude.core.errors import RequestError

ENDPOINT = {"_type": "openai", "model_name": "m", "base_url": "http://127.0.0.1:9", "api_key": "none"}


def config(*devices: str, cluster: dict[str, Any] | None = None, gpu_hours: float | None = 1.0) -> Any:
    llms: dict[str, Any] = {
        f"m{n}": {"_type": "local", "model": "m", "device": d} for n, d in enumerate(devices)
    }
    data: dict[str, Any] = {"llms": llms or {"endpoint": ENDPOINT}}
    if cluster is not None:
        data["cluster"] = {"_type": "ray", **cluster}
    if gpu_hours is not None:
        data["budget"] = {"gpu_hours": gpu_hours}
    return parse_config(data)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says that it has GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


@pytest.mark.parametrize(
    ("devices", "cluster", "held"),
    [
        (["auto"], None, 1),
        (["auto", "cuda", "cuda:0"], None, 1),
        (["cuda:0", "cuda:1", "cpu"], None, 2),
        (["cpu"], {"runners": 3, "num_gpus": 0.5}, 1.5),
        (["cuda"], {"runners": 2, "learners": 4}, 5),
        (["cpu"], {"runners": 2, "learners": 4, "learner_gpus": 2}, 8),
        ([], {"runners": 2, "num_gpus": 1}, 2),
    ],
)
def test_the_gpus_of_this_machine_and_of_the_clusters_processes_are_held(
    cuda: None, devices: list[str], cluster: dict[str, Any] | None, held: float
):
    asked = config(*devices, cluster=cluster)
    assert gpus_held(asked) == held
    require_counted(asked)


def test_learners_on_gpus_of_other_machines_are_held_by_a_head_without_any():
    assert gpus_held(config("cuda", cluster={"learners": 4, "runners": 0})) == 4


@pytest.mark.parametrize("devices", [["cpu"], ["auto"], []])
def test_a_limit_that_would_never_be_reached_is_refused(devices: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match=r"the run holds no GPU .* set budget.hours in its place"):
        require_bounded(config(*devices))
    require_bounded(config(*devices, gpu_hours=None))


def test_what_only_the_cluster_knows_has_to_be_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RequestError, match=r"set cluster.learner_gpus"):
        require_bounded(config("auto", cluster={"learners": 4, "runners": 0}))
    require_bounded(config("auto", cluster={"learners": 4, "runners": 0, "learner_gpus": 1}))
