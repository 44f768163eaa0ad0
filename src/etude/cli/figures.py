"""Printing what a run measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.cli.console import say


def show_figures(summary: Mapping[str, Any]) -> None:
    """A line for each figure and version of one model's summary."""
    from etude.report.figure_lines import figure_lines

    for label, text in figure_lines(summary):
        say(f"{label:<15} {text}")
