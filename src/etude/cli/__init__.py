"""The command line: one file per command, parsing and printing only."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType


def main() -> None:
    """The program `etude`."""
    try:
        # Even these take long enough to be interrupted.
        import signal

        before = signal.signal(signal.SIGINT, _end)
        from etude.core.process import set_up_process

        set_up_process()
        from etude.cli.app import app

        signal.signal(signal.SIGINT, before)
        try:
            app()
        finally:
            # Whatever is left to do: the system ends it, where Python would show what it was.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        _end()


def _end(number: int = 2, frame: FrameType | None = None) -> None:
    """End the process on Ctrl-C (SIGINT, 2) while there is no command yet: nothing was begun so far."""
    import os

    os.write(2, b"stopped\n")
    os._exit(128 + number)
