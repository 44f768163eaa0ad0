"""`python -m etude.processes.ray_team FILE`: starts a team on a cluster, and lives as long."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from etude.core.errors import EtudeError, RequestError, StoreError, first_line
from etude.core.process import set_up_process
from etude.processes.ray_teams import (
    CAUSE,
    SHARED_FILE,
    HeadObject,
    TeamOrder,
    TeamProcess,
    connect,
    no_cluster,
)
from etude.store.files import write_atomically
from etude.store.run_folder import RunLock
from etude.store.status import tell_team

_LOOK_SECONDS = 0.2
_JOIN_SECONDS = 90.0
_ALARM_SECONDS = 5.0
_LAST_WORDS_SECONDS = 3.0
"""Seconds to hear from processes that end after the first, which may only have lost its peer."""
_BEGIN_SECONDS = 120.0
"""Seconds for a team's processes to start, after Ray has reserved their resources."""


class TeamLost(EtudeError):
    """The team could not be started, or one of its processes ended early."""


def main() -> int:
    """Start the team of the order in a file. Returns 0 once it is done, or if another team is at work."""
    set_up_process()
    path = Path(sys.argv[1])
    order = TeamOrder.model_validate_json(path.read_text(encoding="utf-8"))
    path.unlink()
    try:
        lock = RunLock(order.folder / "lock")
    except StoreError:
        return 0  # The process that waits for the lock sees when the others end.
    stopping, code = threading.Event(), 0
    try:
        _join(order)
        # Ray has installed its own handler.
        signal.signal(signal.SIGTERM, lambda number, frame: stopping.set())
        _run(order, stopping)
    except TeamLost as error:
        sys.stderr.write(f"{CAUSE}{error}\n")
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    lock.release()
    # Immediately: Ray ends everything that belongs to a driver without a process.
    os._exit(code)


def _join(order: TeamOrder) -> None:
    """Become a driver of the cluster. Raises TeamLost."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    config = order.config
    address, seconds = config.address, min(_JOIN_SECONDS, config.learner_wait)

    def give_up() -> None:
        sys.stderr.write(f"{CAUSE}{no_cluster(address, f'no answer within {seconds:g} s')}\n")
        sys.stderr.flush()
        os._exit(1)

    # If nobody answers, Ray tries for many minutes and cannot be stopped.
    alarm = threading.Timer(seconds + _ALARM_SECONDS, give_up)
    alarm.daemon = True
    alarm.start()
    try:
        connect(address, config.runtime_env, order.code, seconds=seconds, shows_output=True)
    except RequestError as error:
        raise TeamLost(first_line(error)) from error
    finally:
        alarm.cancel()


def _run(order: TeamOrder, stopping: threading.Event) -> None:
    """Place the processes and run them to their end. Raises TeamLost."""
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    desk_class = ray.remote(num_cpus=0, max_concurrency=16, scheduling_strategy=here)(HeadObject)
    desk = desk_class.remote(order.desk, order.arguments[-1])
    mark = secrets.token_hex(16)
    write_atomically(order.folder / SHARED_FILE, mark)
    tell_team(order.folder, order.processes)
    parts = _parts(order, stopping)
    if not parts:
        return
    try:
        places = ray.get([part.address.remote() for part in parts], timeout=_BEGIN_SECONDS)
    except (RayActorError, GetTimeoutError) as error:
        raise TeamLost(f"a process ended before it began: {first_line(error)}") from error
    tell_team(order.folder, order.processes, tuple(node for node, _ in places))
    # Only Ray may see the runtime environment.
    plain = order.model_copy(update={"config": order.config.model_copy(update={"runtime_env": {}})})
    runs = {part.run.remote(plain, desk, mark, rank, places[0]): rank for rank, part in enumerate(parts)}
    _watch(runs, desk, stopping)


def _parts(order: TeamOrder, stopping: threading.Event) -> list[Any]:
    """Place the processes; none if the team was asked to stop. Raises TeamLost without room in time."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    seconds, count = order.config.learner_wait, order.processes
    room = order.config.learner_room(ray.cluster_resources(), on_gpus=order.on_gpus)
    group, end = placement_group([room] * count, strategy="PACK"), time.monotonic() + seconds
    while not group.wait(_LOOK_SECONDS):
        if stopping.is_set():
            return []
        if time.monotonic() >= end:
            words = " and ".join(f"{amount:g} {name}" for name, amount in room.items())
            raise TeamLost(
                f"the cluster had no room for {count} processes of {words} within {seconds:g} s: it has "
                f"{_nodes()}; add nodes, or ask for fewer"
            )
    placed = [PlacementGroupSchedulingStrategy(group, index) for index in range(count)]
    part_class = ray.remote(TeamProcess)
    cpus, gpus = room["CPU"], room.get("GPU", 0)
    return [
        part_class.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=at).remote() for at in placed
    ]


def _watch(runs: dict[Any, int], desk: Any, stopping: threading.Event) -> None:
    """Wait until all processes are done. Raises TeamLost with the cause of the first failure."""
    import ray
    from ray.exceptions import RayActorError

    left, failures, asked, deadline = dict(runs), dict[int, Exception](), False, float("inf")
    while left and time.monotonic() < deadline:
        ended, _ = ray.wait(list(left), num_returns=1, timeout=_LOOK_SECONDS)
        for run in ended:
            try:
                ray.get(run)
            except Exception as error:  # noqa: BLE001  any error ends the team, and its cause is reported
                failures[left[run]] = error
                deadline = min(deadline, time.monotonic() + _LAST_WORDS_SECONDS)
            del left[run]
        if stopping.is_set() and not asked:
            asked = True
            desk.stop.remote()
        # A process that failed without crashing has usually lost one of the others.
        if any(isinstance(error, RayActorError) for error in failures.values()):
            break
    if failures:
        raise TeamLost(_cause(failures))


def _nodes() -> str:
    """Describe the current nodes and their resources."""
    import ray

    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    rooms = "; ".join(f"{node.get('CPU', 0):g} CPU, {node.get('GPU', 0):g} GPU" for node in alive)
    return f"{len(alive)} nodes ({rooms})"


def _cause(failures: dict[int, Exception]) -> str:
    """Describe the first failed process. A killed process comes before those that lost it."""
    from ray.exceptions import RayActorError

    killed = {rank: error for rank, error in failures.items() if isinstance(error, RayActorError)}
    rank, error = min((killed or failures).items())
    if not killed:
        return f"process {rank}: {first_line(error)}"
    text = str(error)
    if "node" in text and ("node has died" in text or "was terminated" in text):
        return f"process {rank}: its node was lost"
    return f"process {rank}: it was killed, or crashed"


if __name__ == "__main__":
    sys.exit(main())
