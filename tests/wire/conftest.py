from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from etude.wire.http_server import EndpointServer
from tests.cli.conftest import base, local, project

__all__ = ["base", "local", "project"]
"""Fixtures of the command-line tests."""


@pytest.fixture
async def server() -> AsyncIterator[EndpointServer]:
    server = EndpointServer()
    yield server
    await server.close()
