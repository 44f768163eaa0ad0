"""`etude view [RUN]`: show runs, episodes and tokens in a browser."""

from __future__ import annotations

from typing import Annotated

from etude.cli.command import RUNS, OutputDir, argument, option
from etude.cli.console import say, shown_path


def view(
    run: Annotated[
        str | None, argument("A run folder, or a run's name in --output-dir; by default all of them.")
    ] = None,
    output_dir: OutputDir = RUNS,
    port: Annotated[
        int | None, option("The port; by default 7331, or a free one if that is taken.", min=0, max=65535)
    ] = None,
) -> None:
    """Show runs, episodes and tokens in a browser, also while they are made. Ctrl-C stops it.

    Only this machine can reach the page, and only with the printed link. The page changes nothing.
    """
    from etude.store.facts import find_run
    from etude.view.app import serve_view

    path = None if run is None else find_run(run, output_dir)
    root = output_dir.absolute() if path is None else path.parent
    serve_view(
        root,
        lambda address, key: say(
            f"the runs in {shown_path(root)} are shown at\n\n  {address}?open={key}\n\nCtrl-C stops it."
        ),
        run=None if path is None else path.name,
        port=port,
    )
