"""A process of a team, as an actor of Ray's."""

from __future__ import annotations

import importlib
import os
import socket
import sys
from typing import Any

from etude.cluster.launch import TeamOrder
from etude.cluster.seat import HeadLost, Seat, take_seat
from etude.core.errors import EtudeError

_CALL_SECONDS = 120.0
"""That the head has for an answer."""


class PartFailed(EtudeError):
    """A process of a team has not done its part, for a reason that its log says."""


class Part:
    """Runs the module of an order."""

    def address(self) -> tuple[str, int]:
        """Where others find this process: its node, and a port that is free there."""
        import ray

        node = str(ray.util.get_node_ip_address())
        with socket.socket() as listening:
            listening.bind(("", 0))
            return node, int(listening.getsockname()[1])

    def run(self, order_text: str, desk: Any, mark: str, rank: int, size: int, first: tuple[str, int]) -> str:
        """Do this process's part in a team of `size`, whose first process is at `first`; its node.

        Raises PartFailed.
        """
        order, (node, _) = TeamOrder.model_validate_json(order_text), self.address()
        # As a launcher of torch's would. Ray shows each process its own devices, so that it is the only one.
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": first[0], "MASTER_PORT": str(first[1])}
        take_seat(Seat(rank, node, order.folder, mark, _line_to(desk)))
        sys.argv = [order.module, *order.arguments]
        if importlib.import_module(order.module).main():
            raise PartFailed(f"process {rank} on {node} has not done its part; the log says why")
        return node


def _line_to(desk: Any) -> Any:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    def call(name: str, *args: Any, **options: Any) -> Any:
        try:
            return ray.get(getattr(desk, name).remote(*args, **options), timeout=_CALL_SECONDS)
        except RayTaskError as error:
            raise error.cause from error
        except (RayActorError, GetTimeoutError) as error:
            raise HeadLost(
                "the process on the head that started this one ended, or does not answer"
            ) from error

    return call
