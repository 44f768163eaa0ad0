"""A folder at an address of fsspec: objects that are written, read back by digest, listed and deleted.

Every call may block for as long as the network likes: callers are threads that nobody has to wait for.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.core.errors import MissingExtraError, RequestError
from etude.store.files import open_private, private_folder

_PIECE = 8 << 20
"""Bytes that are read or written at once."""
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


@dataclass(frozen=True, slots=True)
class Content:
    """Some bytes, by their SHA-256 and their number."""

    sha256: str
    size: int

    @classmethod
    def of(cls, data: bytes) -> Content:
        """The content of `data`."""
        return cls(hashlib.sha256(data).hexdigest(), len(data))

    @classmethod
    def of_file(cls, path: Path, size: int | None = None) -> Content:
        """The content of a file, or of its first `size` bytes."""
        with path.open("rb") as file:
            return _digest(iter(lambda: file.read(_PIECE), b""), size)


def _digest(pieces: Iterable[bytes], size: int | None = None) -> Content:
    digest, left, total = hashlib.sha256(), size, 0
    for whole in pieces:
        piece = whole if left is None else whole[:left]
        digest.update(piece)
        total += len(piece)
        if left is not None:
            left -= len(piece)
            if not left:
                break
    return Content(digest.hexdigest(), total)


def address_of_run(text: str) -> tuple[str, str]:
    """The parent address and the name in `s3://bucket/etude/NAME`. Raises RequestError."""
    parent, _, name = text.rstrip("/").rpartition("/")
    if not name or parent.endswith(":/") or parent.endswith(":"):
        raise RequestError(f"{text} names no run: write ADDRESS/RUN, as in s3://bucket/etude/my-run")
    return parent, name


class Address:
    """A folder at an address. Its errors are those of fsspec's driver, most of them OSError."""

    def __init__(self, text: str, options: Mapping[str, Any]) -> None:
        """Raises MissingExtraError without fsspec, RequestError where the driver is missing or refuses."""
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingExtraError(f"storage: {text}", "storage") from error
        self.text = text
        scheme = text.partition("://")[0]
        try:
            self._system, self._path = url_to_fs(text, **_without_listings(scheme, options))
        except ImportError as error:
            package = _PACKAGES.get(scheme)
            hint = (
                f"install its driver: pip install {package}" if package else f"install its driver ({error})"
            )
            raise RequestError(
                f"storage {text}: fsspec has no driver for {scheme}:// here; {hint}"
            ) from error
        except (TypeError, ValueError) as error:
            raise RequestError(f"storage {text}: {error}; check its address and 'storage.options'") from error
        self._is_local = scheme in ("file", "local")

    def names(self, folder: str) -> list[str]:
        """The names of all objects under `folder`, in order; none where there is no such folder."""
        self._system.invalidate_cache()
        root = f"{self._path}/{folder}"
        paths = (str(path) for path in self._system.find(root))
        return sorted(
            f"{folder}/{path.rpartition(f'{root}/')[2]}" for path in paths if not path.endswith(".part")
        )

    def folders(self) -> list[str]:
        """The names of the folders right here."""
        self._system.invalidate_cache()
        try:
            entries = self._system.ls(self._path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(Path(entry["name"]).name for entry in entries if entry["type"] == "directory")

    def read(self, name: str) -> bytes:
        """The bytes of an object. Raises FileNotFoundError."""
        data: bytes = self._system.cat_file(f"{self._path}/{name}")
        return data

    def pieces(self, name: str, size: int) -> Iterator[bytes]:
        """The bytes of an object that should have `size` of them, a piece at a time, and one more byte."""
        if not size:
            yield self.read(name)
        for start in range(0, size, _PIECE):
            end = start + _PIECE if start + _PIECE < size else size + 1
            yield self._system.cat_file(f"{self._path}/{name}", start=start, end=end)

    def content(self, name: str, size: int) -> Content:
        """The digest of an object as it is stored."""
        return _digest(self.pieces(name, size))

    def write(self, name: str, source: Path, size: int) -> None:
        """Write the first `size` bytes of a file as an object, in place of what is there."""
        path = f"{self._path}/{name}"
        if self._is_local:
            private_folder(Path(path).parent)
            opened = open_private(Path(path), "wb")
        else:
            opened = self._system.open(path, "wb")
        with source.open("rb") as file, opened as target:
            left = size
            while left and (piece := file.read(min(_PIECE, left))):
                target.write(piece)
                left -= len(piece)

    def create(self, name: str, data: bytes) -> None:
        """Write a new object, whole or not at all. Raises FileExistsError where there is one."""
        path = f"{self._path}/{name}"
        if not self._is_local:
            self._system.pipe_file(path, data, mode="create")
            return
        final = Path(path)
        private_folder(final.parent)
        draft = final.with_name(f"{final.name}.{secrets.token_hex(4)}.part")
        try:
            with open_private(draft, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, final)
        finally:
            draft.unlink(missing_ok=True)

    def require_exclusive(self, name: str, data: bytes) -> None:
        """Raise RequestError where an object that is there can be created again."""
        try:
            self.create(name, data)
        except FileExistsError:
            return
        raise RequestError(
            f"{self.text}: the driver overwrites an object that it was told to create, so that two heads "
            "would not notice each other; take a newer release of the driver, or another storage"
        )

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are gone already are no matter."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._system.rm_file(f"{self._path}/{name}")


def _without_listings(scheme: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with no memory of what was listed before: another head may have written meanwhile."""
    remembers = scheme in ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss")
    return {**({"use_listings_cache": False} if remembers else {}), **options}
