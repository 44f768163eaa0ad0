"""Sums up the plays of a run: accuracy in all and by class, precision, recall, retries and more.

python summary.py RUN [--phase eval] [--json]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from etude.scenarios.summary import summarise_phase
from etude.store.run_folder import RunFolder


def main() -> None:
    """Print the summary."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--phase", default="eval", help="eval, validation/2, train/1, …")
    parser.add_argument("--json", action="store_true", dest="as_json")
    wanted = parser.parse_args()
    with RunFolder.read(wanted.run) as run:
        summary = summarise_phase(run.journal, wanted.phase).to_json()
    if wanted.as_json:
        print(json.dumps(summary))
        return
    for name, value in summary.items():
        parts = value.items() if isinstance(value, dict) and "mean" not in value else [("", value)]
        for part, shown in parts:
            print(f"{f'{name} {part}'.strip():32} {_text(shown)}")


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, dict):
        return f"{value['mean']:.3f}   [{value['low']:.3f}, {value['high']:.3f}]   n={value['n']}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
