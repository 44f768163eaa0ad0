"""The command line: one file per command, parsing and printing only."""

from __future__ import annotations


def main() -> None:
    """The program `etude`."""
    from etude.core.garbage import collect_rarely

    collect_rarely()
    from etude.cli.app import app

    app()
