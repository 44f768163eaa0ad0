"""Which clients this server works with."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version

from packaging.version import InvalidVersion, Version

VERSION_HEADER = "x-etude-version"
"""Clients of etude send their version in it, and every answer has the server's."""

WARNING_HEADER = "x-etude-warning"


@cache
def server_version() -> str:
    """The version of etude that this server is."""
    return version("etude")


def refusal_of(client: str) -> str | None:
    """Why a client of that version is refused; None when it is not."""
    try:
        theirs, ours = Version(client), Version(server_version())
    except InvalidVersion:
        return f"the header {VERSION_HEADER} is {client!r:.40}, which is no version"
    if theirs.major == ours.major:
        return None
    return (
        f"this server is etude {ours}, and the client is etude {theirs}: another major version. "
        f"Install etude {ours.major}.* in the client"
    )


def warning_of(client: str) -> str | None:
    """What to warn a client of that version of; None when there is nothing."""
    theirs, ours = Version(client), Version(server_version())
    if theirs.minor == ours.minor:
        return None
    return f"this server is etude {ours}, and the client is etude {theirs}: newer features may be missing"
