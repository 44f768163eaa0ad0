"""What to do next, where several commands say it."""

from __future__ import annotations

from pathlib import Path

from etude.cli.console import path_shown


def after_training(run: Path) -> str:
    """What to do with a trained run: its model is in the run's folder, or at a backend."""
    from etude.epochs.versions import last_version
    from etude.stored.facts import histories_of
    from etude.stored.versions import is_hosted

    shown = path_shown(run)
    versions = {name: last_version(history) for name, history in histories_of(run).items()}
    hosted = [name for name, version in versions.items() if is_hosted(run, version)]
    if not hosted:
        return f"etude export {shown}   (the trained model as a folder)"
    whose = "" if hosted[0] is None else f":{hosted[0]}"
    return f"etude evaluate {shown}/config.yml --model {shown}{whose}   (the model is its backend's)"
