"""Nothing that a test starts outlives the tests: what is still there at the end is ended and named."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator

import psutil
import pytest

_MARK = "ETUDE_TESTS"
"""A variable that all processes inherit which are started in one process of the tests."""
_SECONDS = 20.0
"""For processes to end that were told to."""
_KEPT = ("multiprocessing.resource_tracker", "tests.forked")
"""Python's own, which ends after this process; and the server of commands, which all workers share."""


@pytest.fixture(scope="session", autouse=True)
def no_leftovers() -> Iterator[None]:
    """Fail at the end of the session for each process that is left, with its command, folder and test."""
    os.environ[_MARK] = mark = uuid.uuid4().hex
    yield
    deadline = time.monotonic() + _SECONDS
    while (left := _started_with(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    named = [_describe(process) for process in left]
    for process in left:
        process.kill()
    if named:
        pytest.fail("processes outlive the tests that started them:\n" + "\n".join(named), pytrace=False)


def _started_with(mark: str) -> list[psutil.Process]:
    """The processes below this one or with that mark which are no zombies, the innermost last."""
    found, own = [], psutil.Process()
    # Forks of this process have no mark. What commands of other workers start is below, and has their mark.
    below = own.children(recursive=True)
    for process in psutil.process_iter():
        try:
            if process == own or process.environ().get(_MARK, process in below and mark) != mark:
                continue
            line = " ".join(process.cmdline())
            if process.status() != psutil.STATUS_ZOMBIE and not any(kept in line for kept in _KEPT):
                found.append(process)
        except psutil.Error:
            continue  # It is gone, or somebody else's.
    return found


def _describe(process: psutil.Process) -> str:
    try:
        command, folder = " ".join(process.cmdline())[:200], process.cwd()
        return f"{process.pid}: {command}; in {folder}; {process.environ().get('PYTEST_CURRENT_TEST', '')}"
    except psutil.Error:
        return f"{process.pid}: gone by now"
