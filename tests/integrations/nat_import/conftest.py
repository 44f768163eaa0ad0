"""What tests of imports work on."""

from tests.cli.conftest import base

__all__ = ["base"]
