"""Shared by the benchmarks: their command line, and how they print."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
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


def print_json(result: dict[str, Any], n: dict[str, int], interval: str | None = None) -> None:
    """The result of a benchmark, for machines: a file for results/. `n` says how many there were of what."""
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    head = {"date": date.today().isoformat(), "machine": describe_machine(), "command": command}
    print(json.dumps(head | {"versions": versions(), "n": n, "interval": interval} | result, indent=2))


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
    told = ", ".join(f"{name} {number}" for name, number in versions().items())
    for note in (*notes, told, f"{describe_machine()}; CPU time is steadier where others work too"):
        console.print(note, highlight=False)


def versions() -> dict[str, str]:
    """Of what may be measured."""
    packages = {name: version(name) for name in ("torch", "transformers", "trl") if find_spec(name)}
    return {"python": platform.python_version(), **packages}


def describe_machine() -> str:
    """Its processor, and how busy it is."""
    told = Path("/proc/cpuinfo").read_text(encoding="utf-8") if sys.platform == "linux" else ""
    name = re.search(r"^model name\s*: (.+)", told, re.MULTILINE)
    processor, load = name[1] if name else platform.machine(), os.getloadavg()[0]
    return f"{os.cpu_count()} cores of {processor}, load {load:.1f}"
