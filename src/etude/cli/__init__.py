"""The command line: parsing and printing only."""


def main() -> None:
    """Run the program `etude`."""
    try:
        # These imports already take long enough for a Ctrl-C.
        import signal

        from etude.core.process import set_up_process

        set_up_process()
        from etude.cli.app import app

        try:
            app()
        finally:
            # From here the system ends the process on Ctrl-C; Python would print a traceback.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:  # No command was running yet.
        import os

        os.write(2, b"stopped\n")
        os._exit(130)
