"""Teams on a cluster: what is wrong with it is said, and what room there is."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from etude.core.errors import RequestError, StoreError
from etude.processes.ray_cluster import RayConfig, gpus_each, ray_places, require_ray
from etude.processes.team import TeamMember
from etude.store.run_folder import RunLock
from tests.learner.test_team import launch

ray = pytest.importorskip("ray")


def run(cluster: Any, job: str, folder: Path, size: int = 2, **config: Any) -> tuple[str | None, str]:
    """Why a team on a cluster that does a job of the tests' ended early, and its log."""
    of = RayConfig(address=cluster.address, learners=size, **config)
    (folder / "log").touch()
    try:
        return launch(job, folder, partial(ray_places, config=of, on_gpus=False), size=size)
    finally:
        ray.shutdown()


@pytest.mark.cluster
def test_a_cluster_without_room_is_told_with_what_it_has(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.processes.ray_cluster.ROOM_SECONDS", 1.0)
    cause, _ = run(cluster, "few", tmp_path, size=3)
    assert cause is not None and "no room for 3 processes of 1 CPU within 1 s: it has 3 nodes" in cause


@pytest.mark.cluster
def test_an_address_where_nothing_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.processes.ray_cluster._ANSWER_SECONDS", 1.0)
    cause, _ = run(SimpleNamespace(address="127.0.0.1:1"), "few", tmp_path)
    assert cause is not None
    assert "no Ray cluster at 127.0.0.1:1" in cause and "no answer within 1 s" in cause


def test_the_address_of_rays_client_is_refused() -> None:
    with pytest.raises(RequestError, match="ray start --address"):
        require_ray("ray://10.0.0.1:10001")


@pytest.mark.parametrize("problem", ["another folder", "no locks", None])
def test_a_folder_that_is_not_shared_is_told(tmp_path: Path, problem: str | None) -> None:
    (tmp_path / "shared").write_text("other" if problem == "another folder" else "this")
    lock = RunLock(tmp_path / "head.lock")
    if problem == "no locks":
        lock.release()
    member = TeamMember(1, "10.0.0.2", tmp_path, "this")
    if problem is None:
        member.require_shared()
        return
    with pytest.raises(StoreError, match=r"node 10\.0\.0\.2 .*same path"):
        member.require_shared()


@pytest.mark.parametrize(
    ("gpus", "asked", "on_gpus", "each"),
    [(4, None, True, 1), (4, None, False, 0), (0, None, True, 0), (4, 0.5, True, 0.5)],
)
def test_a_process_has_a_gpu_where_there_are_any(
    gpus: float, asked: float | None, on_gpus: bool, each: float
):
    assert gpus_each(asked, {"CPU": 8, "GPU": gpus}, on_gpus=on_gpus) == each
