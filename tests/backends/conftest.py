"""Fixtures of the backends' tests."""

from __future__ import annotations

from tests.cli.conftest import no_plots

__all__ = ["no_plots"]
"""A plot of the rewards is half of a small run."""
