"""A driver of fsspec that fails as storages do: away, slow, full, hanging, without exclusive creation."""

from __future__ import annotations

import errno
import threading
import time
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Faulty(MemoryFileSystem):
    """Keeps objects in memory, `faulty://…`; its faults are those of the whole class."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    error: ClassVar[Exception | None] = None
    seconds: ClassVar[float] = 0.0
    released: ClassVar[threading.Event] = threading.Event()
    hangs: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False
    tears: ClassVar[bool] = False
    undeletable: ClassVar[bool] = False

    @classmethod
    def heal(cls) -> None:
        """Without faults from now on."""
        cls.error, cls.seconds, cls.hangs = None, 0.0, False
        cls.overwrites = cls.tears = cls.undeletable = False
        cls.released.set()

    def _suffer(self) -> None:
        time.sleep(self.seconds)
        if self.hangs:
            self.released.wait()
            # Or it would still be written when another test has begun.
            raise ConnectionError("the connection was closed")
        if self.error is not None:
            raise self.error

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self._suffer()
        return super().open(path, mode, **options)

    def find(self, path: str, *arguments: Any, **options: Any) -> Any:
        self._suffer()
        return super().find(path, *arguments, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> Any:
        return super().pipe_file(path, value, "overwrite" if self.overwrites else mode, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        return data[:-1] if self.tears else data

    def rm_file(self, path: str) -> None:
        if self.undeletable:
            raise PermissionError(errno.EACCES, "objects are kept by law")
        super().rm_file(path)

    rm = rm_file


fsspec.register_implementation("faulty", Faulty, clobber=True)
