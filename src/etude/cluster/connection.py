"""The connection of a process with a Ray cluster, and the nodes that are there."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from etude.core.errors import MissingExtraError, RequestError, first_line

_ANSWER_SECONDS = 10.0
"""For a cluster to answer where somebody waits for it."""
_PAUSE_SECONDS = 0.2
_LEFT_OUT = ["runs", ".git", ".venv", "node_modules", "**/__pycache__", ".env", ".env.*"]
"""Of the folder that goes along."""


def require_ray(address: str) -> None:
    """Raise MissingExtraError without Ray, RequestError for an address that is not of this kind."""
    if find_spec("ray") is None:
        raise MissingExtraError("a Ray cluster", "ray")
    if address.startswith("ray://"):
        raise RequestError(
            f"{address} is an address for Ray's client, and the processes on the nodes call the one "
            "that starts them: this machine must be a node of the cluster. `ray start --address=HOST:6379 "
            "--num-cpus=0` makes it one that runs nothing else, and the address is then `auto`"
        )


@contextlib.contextmanager
def connected(address: str, runtime_env: Mapping[str, Any], folder: Path | None) -> Iterator[str | None]:
    """Within the block this process is connected with the cluster, to whose nodes `folder` goes along, unless
    the runtime environment names another one. Yields the address of the cluster's own web page, if known.

    Raises MissingExtraError, RequestError.
    """
    require_ray(address)
    import ray

    if ray.is_initialized():
        yield None
        return
    dashboard = connect(address, runtime_env, folder, seconds=_ANSWER_SECONDS)
    try:
        yield dashboard
    finally:
        ray.shutdown()


def connect(
    address: str,
    runtime_env: Mapping[str, Any],
    folder: Path | None,
    *,
    seconds: float,
    shows_output: bool = False,
) -> str | None:
    """Make this process a driver of the cluster, whose workers have `folder` as their current one.

    Returns the address of the cluster's own web page, where it has one.

    It waits for `seconds` for somebody to answer at the address. `shows_output` writes what the workers
    print to this process's output. Raises RequestError.
    """
    import ray

    _wait_for(address, seconds)
    # Etude ends itself on SIGTERM, and need not be told that Ray will not.
    logging.getLogger("ray._private.worker").addFilter(_is_not_about_sigterm)
    # Files can only go along with the whole connection.
    code = {} if folder is None else {"working_dir": str(folder), "excludes": _LEFT_OUT}
    try:
        context = ray.init(
            address=address,
            log_to_driver=shows_output,
            configure_logging=False,
            runtime_env={**code, **runtime_env},
        )
    except ConnectionError as error:
        raise RequestError(no_cluster(address, first_line(error))) from error
    except (ValueError, TypeError, RuntimeError) as error:
        raise RequestError(
            f"Ray cannot connect with {address}, or cannot send '{folder}' to its nodes: "
            f"{first_line(error)}\n"
            "Where it is the folder, name what is to go along: `cluster: {runtime_env: {working_dir: …, "
            "excludes: […]}}`"
        ) from error
    return f"http://{context.dashboard_url}" if context.dashboard_url else None


def _is_not_about_sigterm(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def no_cluster(address: str, reason: str) -> str:
    """The error where there is no cluster."""
    return (
        f"there is no Ray cluster at {address} that this machine is a node of ({reason}); start one: `ray "
        "start --head`, or join one: `ray start --address=HOST:6379`"
    )


def _wait_for(address: str, seconds: float) -> None:
    """Until a named head listens: Ray itself tries for many minutes. Raises RequestError."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():
        return
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
            return
        except OSError as error:
            if time.monotonic() >= end:
                reason = f"no answer within {seconds:g} s: {error.strerror or error}"
                raise RequestError(no_cluster(address, reason)) from error
            time.sleep(_PAUSE_SECONDS)
