"""Shared by the benchmarks: their command line, and how they print."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def parse_arguments(
    description: str, arguments: Sequence[str] | None = None, **flags: str
) -> argparse.Namespace:
    """The two flags that every benchmark takes, `quick` and `json`; and others, with what they do."""
    parser = argument_parser(description)
    for name, told in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", action="store_true", help=told)
    return parser.parse_args(arguments)


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser with those two flags."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="measure less, and less exactly")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def progress(what: str) -> None:
    """Say on stderr what is measured now."""
    print(f"measuring: {what}", file=sys.stderr, flush=True)


def silent(what: str) -> None:
    """Say nothing, for `--json`."""


def print_json(result: dict[str, Any]) -> None:
    """The result of a benchmark, for machines."""
    print(json.dumps(result, indent=2))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]
) -> None:
    """The result of a benchmark, for people; the first column names what was measured."""
    table = Table(title=title, title_justify="left")
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    for note in (*notes, f"on {describe_machine()}"):
        console.print(note, highlight=False)


def describe_machine() -> str:
    """Python, processor and how busy the machine is."""
    load = os.getloadavg()[0]
    return (
        f"Python {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f} "
        "(CPU time is the steadier figure on a machine that others use too)"
    )
