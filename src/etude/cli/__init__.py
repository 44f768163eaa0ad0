"""The command line: parsing and printing only."""

from __future__ import annotations


def main() -> None:
    """The program `etude`."""
    try:
        # Even these take long enough to be interrupted.
        import signal

        from etude.core.process import set_up_process

        set_up_process()
        from etude.cli.app import app

        try:
            app()
        finally:
            # Whatever is left to do: the system ends it, where Python would show what it was.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # There was no command yet.
        import os

        os.write(2, b"stopped\n")
        os._exit(130)
