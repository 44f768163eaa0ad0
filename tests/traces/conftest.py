"""Fixtures of the imported logs' tests."""

from __future__ import annotations

from tests.cli.conftest import base, local, no_plots, project

__all__ = ["base", "local", "no_plots", "project"]
"""Fixtures of the command-line tests."""
