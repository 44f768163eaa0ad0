"""Programs that kill themselves at a place of the test's choice."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any


class Killer:
    """Ends this process by SIGKILL when it comes to a place for the given time."""

    def __init__(self, place: str, count: str) -> None:
        self._place = place
        self._left = int(count)

    def at(self, place: str, method: Callable[..., Any]) -> Any:
        """The async method, each call of which comes to the place first."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            if place == self._place:
                self._left -= 1
                if self._left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return await method(*args, **kwargs)

        return call
