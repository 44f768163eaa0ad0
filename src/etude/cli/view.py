"""`etude view [RUN]`: runs, episodes and tokens in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from etude.cli import hints
from etude.cli.command import RUNS, OutputDir, argument, key_in, option
from etude.cli.console import next_step, path_shown, say


def view(
    run: Annotated[
        str | None, argument("A run folder, or a run's name in --output-dir; by default all of them.")
    ] = None,
    file: Annotated[Path | None, argument("With --export: the file; by default RUN.html.")] = None,
    export: Annotated[
        bool, option("Write RUN as one web page that needs nothing else, and show nothing.", "--export")
    ] = False,
    output_dir: OutputDir = RUNS,
    host: Annotated[str, option("The address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        option("The port; by default 7331, or a free one where that is taken.", min=0, max=65535),
    ] = None,
    share_readonly: Annotated[
        bool,
        option("Let in others who have the key; beyond this machine with --key-env.", "--share-readonly"),
    ] = False,
    key_env: Annotated[
        str | None, option("The environment variable with the key; by default a new one is made.")
    ] = None,
) -> None:
    """Show runs, episodes and tokens in a browser, also while they are made. Ctrl-C stops it.

    Only this machine can reach it, and only with the link that is printed. It changes nothing.
    """
    from etude.store.facts import find_run
    from etude.view.serve import serve_view

    path = None if run is None else find_run(run, output_dir)
    if export or file is not None:
        _export(path, file, export)
        return
    root = output_dir.absolute() if path is None else path.parent
    serve_view(
        root,
        lambda address, made: _say_ready(root, f"{address}?open={made or f'THE-KEY-IN-{key_env}'}"),
        run=None if path is None else path.name,
        host=host,
        port=port,
        key=key_in(key_env),
        shared=share_readonly,
    )


def _export(run: Path | None, file: Path | None, asked: bool) -> None:
    from etude.core.errors import RequestError
    from etude.view.export import export_run

    if run is None or not asked:
        raise RequestError("name a run, and the file to write: etude view --export RUN out.html")
    file = file or Path(f"{run.name}.html")
    count = export_run(run, file)
    say(f"written         {path_shown(file)}, with {count} episodes")
    next_step(hints.show(run))


def _say_ready(root: Path, link: str) -> None:
    say(f"the runs in {path_shown(root)} are shown at\n\n  {link}\n\nCtrl-C stops it.")
