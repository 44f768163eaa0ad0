"""The packages of trackers, each of which is an extra."""

from __future__ import annotations

from importlib.util import find_spec

from etude.core.errors import MissingExtraError


def require_package(module: str, extra: str) -> None:
    """Raise MissingExtraError where a module is not installed."""
    try:
        is_there = find_spec(module) is not None
    except ModuleNotFoundError:
        is_there = False
    if not is_there:
        raise MissingExtraError(f"the tracker '{extra}'", extra)
