"""Options and arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

ConfigFile: TypeAlias = Annotated[Path, typer.Argument(help="The config file.", show_default=False)]
Run: TypeAlias = Annotated[
    str, typer.Argument(help="A run folder, or a run's name in --output-dir.", show_default=False)
]
Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--override",
        "-o",
        metavar="KEY=VALUE",
        help="Set a key of the config: -o finetuning.num_epochs=5, also written -o KEY VALUE. Repeatable.",
        show_default=False,
    ),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Write JSON, for machines.")]
OutputDir: TypeAlias = Annotated[
    Path, typer.Option("--output-dir", help="Where runs are looked for by name.", show_default=True)
]

RUNS = Path("runs")
"""Where runs are by default."""
