"""Whether a storage takes backups: an object is written there, read back and deleted."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from etude.backup.address import Address
from etude.config.storage import StorageConfig
from etude.core.errors import EtudeError, RequestError, words_of
from etude.core.threads import call_in_thread

_HINTS = (
    (FileNotFoundError, "make its bucket or folder first, or mend the address"),
    (PermissionError, "give these credentials the right to list, read, write and delete there"),
)
_ADVICE = (
    "the driver takes its credentials from the environment or from `storage.options`, and an endpoint of "
    "one's own from there too"
)


async def probe(config: StorageConfig) -> str:
    """Write, read and delete a small object at the address; that it worked, in a sentence.

    Nothing is left there. Raises MissingExtraError, and RequestError saying which of these failed and what
    to look at.
    """
    try:
        # Where a driver waits for its network for ever, its thread is left to itself.
        async with asyncio.timeout(config.patience):
            return await call_in_thread(lambda: _round_trip(config))
    except TimeoutError as error:
        raise RequestError(
            f"storage {config.address} did not answer within {config.patience:g} s (storage.patience); is "
            "its address right, and reachable from here?"
        ) from error


def _round_trip(config: StorageConfig) -> str:
    address = Address(config.address, config.driver_options())
    name, data = f"etude-check-{secrets.token_hex(8)}", secrets.token_bytes(64)
    with _explained(config, "an object cannot be written"):
        address.create(name, data)
    try:
        with _explained(config, "what was written cannot be read"):
            if address.read(name) != data:
                raise RequestError(f"storage {config.address}: what is read is not what was written")
        with _explained(config, "an object cannot be created exclusively"):
            address.require_exclusive(name, data)
    finally:
        with _explained(config, f"objects cannot be deleted, and {name} is left there"):
            address.delete([name])
    return f"{config.address} takes backups: an object was written, read back and deleted"


@contextmanager
def _explained(config: StorageConfig, what: str) -> Iterator[None]:
    """Raise whatever the driver raises as an error that says what failed, and what to look at."""
    try:
        yield
    except EtudeError:
        raise
    except Exception as error:
        hint = next((hint for kind, hint in _HINTS if isinstance(error, kind)), _ADVICE)
        raise RequestError(f"storage {config.address}: {what}: {words_of(error)}; {hint}") from error
