"""A folder at an fsspec address. Calls may block for as long as the network does."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar

from etude.config.schema import StorageConfig
from etude.core.errors import EtudeError, MissingExtraError, RequestError, error_words
from etude.core.threads import call_in_thread
from etude.store.files import open_private, private_folder

T = TypeVar("T")

_PIECE = 8 << 20
"""Bytes copied at a time."""


def is_address(text: str) -> bool:
    """Return whether `text` is the address of a run, and not a folder or a name."""
    return "://" in text


def split_run_address(text: str) -> tuple[str, str]:
    """Split `s3://bucket/etude/NAME` into the parent address and the name. Raises RequestError."""
    parent, _, name = text.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/") or parent.endswith(":"):
        raise RequestError(f"{text} names no run: write ADDRESS/RUN, as in s3://bucket/etude/my-run")
    return parent, name


class Address:
    """A folder at an address. Its methods raise the errors of fsspec's driver, most of them OSError."""

    def __init__(self, text: str, options: Mapping[str, Any]) -> None:
        """Raise MissingExtraError without fsspec, RequestError if the driver is missing or refuses."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingExtraError(f"storage: {text}", "storage") from error
        self.text = text
        try:
            self._system, self._path = url_to_fs(text, **options)
        except ImportError as error:
            raise RequestError(f"storage {text}: fsspec has no driver for it here: {error}") from error
        except (TypeError, ValueError) as error:
            raise RequestError(f"storage {text}: {error}; check its address and 'storage.options'") from error
        self._is_local = text.startswith(("file:", "local:"))

    def read(self, name: str) -> bytes:
        """Return the bytes of an object. Raises FileNotFoundError."""
        data: bytes = self._system.cat_file(f"{self._path}/{name}")
        return data

    def write(self, name: str, data: bytes) -> None:
        """Write a small object, replacing the old one."""
        with self._open_for_writing(f"{self._path}/{name}") as target:
            target.write(data)

    def upload(self, source: Path, name: str) -> None:
        """Upload a file as an object. The old object stays until the upload is complete."""
        path = f"{self._path}/{name}"
        with source.open("rb") as file, self._open_for_writing(f"{path}.part") as target:
            shutil.copyfileobj(file, target, _PIECE)
        self._system.mv(f"{path}.part", path)

    def download(self, name: str, target: Path) -> None:
        """Download an object to a file. Raises FileNotFoundError."""
        self._system.get_file(f"{self._path}/{name}", str(target))

    def delete(self, name: str) -> None:
        """Delete an object. Raises FileNotFoundError."""
        self._system.rm(f"{self._path}/{name}")

    def _open_for_writing(self, path: str) -> IO[bytes]:
        """Open an object for writing. On this machine, only the user may read it."""
        if self._is_local:
            private_folder(Path(path).parent)
            return open_private(Path(path), "wb")
        opened: IO[bytes] = self._system.open(path, "wb")
        return opened


PATIENCE = 60.0
"""Seconds that a run waits for its storage, at its beginning and its end."""


async def call_storage(config: StorageConfig, call: Callable[[], T], seconds: float | None = None) -> T:
    """Run a call in a thread, which is abandoned after some seconds (`PATIENCE`). Raises RequestError."""
    seconds = PATIENCE if seconds is None else seconds
    try:
        async with asyncio.timeout(seconds):
            return await call_in_thread(call)
    except TimeoutError as error:
        raise RequestError(
            f"storage {config.address} did not answer within {seconds:g} s; is its "
            "address right, and reachable from here?"
        ) from error
    except EtudeError:
        raise
    except Exception as error:
        raise RequestError(
            f"storage {config.address}: {error_words(error)}; is there such a bucket or folder, and may "
            "these credentials read, write and delete there? They come from the environment or "
            "`storage.options`"
        ) from error


async def probe(config: StorageConfig) -> str:
    """Write, read and delete an object at the address; return a sentence. Raises RequestError."""
    name, data = f"etude-check-{secrets.token_hex(8)}", secrets.token_bytes(64)

    def round_trip() -> bytes:
        address = Address(config.address, config.options)
        address.write(name, data)
        read = address.read(name)
        address.delete(name)
        return read

    if await call_storage(config, round_trip) != data:
        raise RequestError(f"storage {config.address}: what is read is not what was written")
    return f"{config.address} takes backups: an object was written, read back and deleted"
