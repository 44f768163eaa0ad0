"""Packages and servers of trackers: whether one is there."""

from __future__ import annotations

from importlib.util import find_spec

from etude.core.errors import EtudeError, MissingExtraError, first_line

SECONDS_TO_ANSWER = 10.0


def require_package(module: str, extra: str) -> None:
    """Raise MissingExtraError where a module is not installed."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise MissingExtraError(f"the tracker '{extra}'", extra)


def require_server(url: str) -> None:
    """Raise EtudeError where nobody answers at an address of HTTP: packages would try for minutes."""
    import httpx  # Only here: most runs have no such tracker.

    try:
        httpx.head(url, timeout=SECONDS_TO_ANSWER, verify=False)  # Nothing is sent, and nothing believed.
    except httpx.TransportError as error:
        raise EtudeError(f"nobody answers at {url}: {first_line(error)}") from error
