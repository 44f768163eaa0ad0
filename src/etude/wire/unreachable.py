"""Why a server gave no answer, and whether its address has http where https belongs, or the reverse."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import httpx

_PROBE_SECONDS = 3.0
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNSUPPORTED_PROTOCOL", "RECORD_LAYER_FAILURE")
"""OpenSSL's reasons where what comes is no TLS."""
WRITE_HTTP = "the server speaks plain HTTP: write http:// in place of https:// in the address"
WRITE_HTTPS = "the server speaks TLS: write https:// in place of http:// in the address"


def reason_of(error: httpx.RequestError) -> str:
    """The error in words, with what to change where it is known."""
    import httpx

    if isinstance(error, httpx.UnsupportedProtocol):
        return "an address begins with http:// or https://"
    words = f"{type(error).__name__}: {error}".rstrip(": ")
    if isinstance(error, httpx.ConnectTimeout):
        is_tls = error.request.url.scheme == "https"
        return f"{words}: no connection" + (f", or {WRITE_HTTP}" if is_tls else "")
    ssl_errors = [each for each in _chain(error) if isinstance(each, ssl.SSLError)]
    if any(isinstance(each, ssl.SSLCertVerificationError) for each in ssl_errors):
        return f"{words}; name a file of certificates to trust in SSL_CERT_FILE, or mend the server's"
    return f"{words}; {WRITE_HTTP}" if is_plain_http(error) else words


def is_plain_http(error: httpx.RequestError) -> bool:
    """Whether the address is one of https, and what answered there is not TLS."""
    # Those of aiohttp's that are SSLErrors may have no reason; the error behind them has one.
    return any(getattr(each, "reason", None) in _NOT_TLS for each in _chain(error))


async def speaks_tls(url: str) -> bool:
    """Whether the server of an http address answers a TLS handshake. Never raises, and takes some seconds."""
    parts = urlsplit(url)
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(_PROBE_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, parts.port or 80, ssl=context)
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(_PROBE_SECONDS):
            await writer.wait_closed()
    return True


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
