"""http where https belongs, and the reverse: the error says what to write."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from etude.core.call import ChatRequest
from etude.core.errors import EngineError
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from etude.wire.retries import Refused, failure_of
from tests.faults.remote_faults import FaultyEndpoint


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A self-signed certificate of 127.0.0.1, with its key."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    made = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=127.0.0.1",
    ]
    subprocess.run(
        ["openssl", *made, "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True
    )
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path


@asynccontextmanager
async def tls_server(certificate: Path) -> AsyncIterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def said(url: str) -> str:
    engine = OpenAiEngine(OpenAiLlmConfig(model_name="tiny", base_url=url, retry_wait=0.001))
    with pytest.raises(EngineError) as caught:
        await engine.complete(ChatRequest(({"role": "user", "content": "x"},)))
    await engine.close()
    return str(caught.value)


async def test_plain_http_behind_https() -> None:
    async with FaultyEndpoint().serving() as endpoint:
        error = await said(endpoint.url("well").replace("http://", "https://"))
    assert "the server speaks plain HTTP: write http:// in place of https:// in the address" in error


async def test_a_certificate_that_nobody_knows(certificate: Path) -> None:
    async with tls_server(certificate) as host:
        error = await said(f"https://{host}/v1")
    assert "CERTIFICATE_VERIFY_FAILED" in error and "SSL_CERT_FILE" in error


def test_servers_that_say_it_themselves() -> None:
    told = b"Client sent an HTTP request to an HTTPS server.\n"
    failure = failure_of(400, {}, told)
    assert isinstance(failure, Refused) and not failure.impossible
    assert "write https:// in place of http://" in str(failure)
