"""Fixtures of the imported logs' tests."""

from __future__ import annotations

from tests.cli.conftest import base, local, project

__all__ = ["base", "local", "project"]
"""Fixtures of the command-line tests."""
