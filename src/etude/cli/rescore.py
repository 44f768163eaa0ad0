"""`etude evaluate --rescore RUN`: other evaluators, same episodes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from etude.cli import hints
from etude.cli.console import next_step
from etude.cli.errors import then
from etude.cli.evaluate import show
from etude.cli.running import run as run_async


def rescore_run(
    run: str,
    config: Path | None,
    overrides: Sequence[str],
    *,
    phase: str | None,
    root: Path,
    as_json: bool,
    per_example: bool,
) -> None:
    """Score the stored episodes of a run with the evaluators of a config, by default its own."""
    from etude.config.load import load_config
    from etude.loop.evaluation import rescore_run as rescore
    from etude.report.progress import progress_for
    from etude.store.find import find_run
    from etude.store.run_folder import RunFolder
    from etude.store.stored_config import CONFIG

    path = find_run(run, root)
    settings = load_config(config or path / CONFIG, overrides)
    with (
        RunFolder.open(path) as folder,
        then(hints.again),
        progress_for(stream=sys.stderr if as_json else None) as progress,
    ):
        scored, evaluation = run_async(rescore(settings, folder, phase=phase, progress=progress))
    show(evaluation, {"run": str(path), "phase": scored}, as_json=as_json, per_example=per_example)
    if not as_json:
        next_step(hints.show(path))
