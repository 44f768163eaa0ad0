"""Whether a tracker's server is there: asked before its package, which would try for minutes."""

from __future__ import annotations

from etude.core.errors import EtudeError, first_line

SECONDS_TO_ANSWER = 10.0


def require_server(url: str) -> None:
    """Raise EtudeError where nobody answers at an address of HTTP."""
    import httpx  # Only here: most runs have no such tracker.

    try:
        httpx.head(url, timeout=SECONDS_TO_ANSWER, verify=False)  # Nothing is sent, and nothing believed.
    except httpx.TransportError as error:
        raise EtudeError(f"nobody answers at {url}: {first_line(error)}") from error
