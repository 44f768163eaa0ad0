"""A team on two nodes: it learns what one process learns, and says what is wrong with the cluster."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from etude.core.errors import RequestError, StoreError
from etude.models.weights import load_tensors
from etude.processes.ray_teams import SHARED_FILE, RayConfig, RayTeams, TeamMember, find_room, require_ray
from etude.store.run_folder import RunLock
from etude.store.status import TEAM, Team
from tests.learner.team_process import trained_on_few
from tests.learner.test_team import SOURCE, assert_near


def launcher(address: str, **config: Any) -> RayTeams:
    return RayTeams(config=RayConfig(address=address, **config), desk="pathlib:Path", on_gpus=False)


def run(
    cluster: Any, job: str, folder: Path, processes: int = 2, **config: Any
) -> tuple[int, str, str | None]:
    """The exit code of a team that does a job of the tests', its log, and why it ended."""
    launch = launcher(cluster.address, learners=processes, **config)
    order = folder / "job"
    order.mkdir()
    command = launch.command("tests.learner.team_process", [job, str(folder)], processes, order)
    path = os.pathsep.join([str(SOURCE), str(SOURCE / "src")])
    environment = os.environ | {"PYTHONPATH": path}
    ended = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )
    return ended.returncode, ended.stdout, launch.first_failure(ended.stdout)


@pytest.mark.cluster
def test_two_nodes_learn_what_one_process_does(cluster: Any, tmp_path: Path) -> None:
    code, log, cause = run(cluster, "few", tmp_path)
    assert (code, cause) == (0, None), log
    team = Team.model_validate_json((tmp_path / "job" / TEAM).read_text())
    assert (team.wanted, len(team.nodes)) == (2, 2)
    policy = trained_on_few()
    assert_near(load_tensors(tmp_path / "few.safetensors"), policy.copy_tensors(), policy.base_tensors())


@pytest.mark.cluster
def test_a_cluster_without_room_is_told_with_what_it_has(cluster: Any, tmp_path: Path) -> None:
    code, log, cause = run(cluster, "few", tmp_path, processes=3, learner_wait=1)
    assert code == 1, log
    assert cause is not None and "no room for 3 processes of 1 CPU within 1 s: it has 3 nodes" in cause


@pytest.mark.cluster
def test_a_killed_process_ends_the_others(cluster: Any, tmp_path: Path) -> None:
    code, log, cause = run(cluster, "dies", tmp_path)
    assert code == 1, log
    assert cause == "process 1: it was killed, or crashed"


@pytest.mark.cluster
def test_an_address_where_nothing_is(tmp_path: Path) -> None:
    class Nowhere:
        address = "127.0.0.1:1"

    code, log, cause = run(Nowhere, "few", tmp_path, learner_wait=3)
    assert code == 1 and cause is not None, log
    assert "no Ray cluster at 127.0.0.1:1" in cause and "no answer within 3 s" in cause


def test_the_address_of_rays_client_is_refused() -> None:
    with pytest.raises(RequestError, match="ray start --address"):
        require_ray("ray://10.0.0.1:10001")


@pytest.mark.parametrize("problem", ["another folder", "no locks", None])
def test_a_folder_that_is_not_shared_is_told(tmp_path: Path, problem: str | None) -> None:
    (tmp_path / SHARED_FILE).write_text("other" if problem == "another folder" else "this")
    lock = RunLock(tmp_path / "lock")
    if problem == "no locks":
        lock.release()
    seat = TeamMember(1, "10.0.0.2", tmp_path, "this", lambda name: None)
    if problem is None:
        seat.require_shared()
        return
    with pytest.raises(StoreError, match=r"on node 10\.0\.0\.2 is .*that all nodes mount at the same path"):
        seat.require_shared()


@pytest.mark.parametrize(
    ("cpus", "count", "is_ready", "told"),
    [
        ((2, 2, 4), 3, True, "3 runners on 2 of 3 nodes"),
        ((0.5, 0.5), 1, False, "room for 0 of 1 runners with {CPU: 1} on 2 nodes; ask for fewer"),
    ],
)
def test_processes_have_room_or_not(cpus, count, is_ready, told):
    found = find_room("runners", count, {"CPU": 1.0}, [{"CPU": each} for each in cpus])
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
