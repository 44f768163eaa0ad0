"""A program that asks a server's `/health` until its standard input ends, and prints how long answers took.

A process of its own, as a monitor is: in the process of a crowd, an answer waits for the crowd's answers too.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 0.02
"""From an answer to the next question."""
_PATIENCE = 120.0


@contextmanager
def health_watched(host: str, port: int) -> Iterator[dict[str, Any]]:
    """Ask for as long as the block takes; its figures are there after it."""
    figures: dict[str, Any] = {}
    command = [sys.executable, __file__, host, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdin is not None and watch.stdout is not None
        watch.stdout.readline()
        try:
            yield figures
        finally:
            watch.stdin.close()
            figures.update(json.loads(watch.stdout.read()))


def main(host: str, port: int) -> None:
    """Ask, each time over a new connection."""
    seconds, problems = [], []
    print("asking", flush=True)
    while not select.select([sys.stdin], [], [], _SECONDS)[0]:
        begun = time.monotonic()
        connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE)
        try:
            connection.request("GET", "/health")
            status = connection.getresponse().status
            problems += [f"/health answered {status}"] if status != 200 else []
        except OSError as error:
            problems.append(f"/health: {error!r}")
        finally:
            connection.close()
        seconds.append(time.monotonic() - begun)
    longest = round(max(seconds, default=0.0), 3)
    print(json.dumps({"health_asked": len(seconds), "health_longest_seconds": longest, "problems": problems}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
