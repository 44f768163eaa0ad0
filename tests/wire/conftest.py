from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from etude.wire.endpoint import EndpointServer


@pytest.fixture
async def server() -> AsyncIterator[EndpointServer]:
    server = EndpointServer()
    yield server
    await server.close()
