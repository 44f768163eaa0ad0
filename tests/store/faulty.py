"""A driver of fsspec that fails as storages do: away, full, hanging, torn."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem


class Faulty(MemoryFileSystem):
    """Keeps objects in memory, `faulty://…`; its faults are the whole class's."""

    protocol = "faulty"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    error: ClassVar[Exception | None] = None
    hangs: ClassVar[bool] = False
    tears: ClassVar[bool] = False

    @classmethod
    def heal(cls) -> None:
        """Without faults from now on."""
        cls.error, cls.hangs, cls.tears = None, False, False

    def open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if self.hangs:
            threading.Event().wait()  # For ever, or what waits for it would write into another test.
        if self.error is not None:
            raise self.error
        return super().open(path, mode, **options)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **options: Any) -> bytes:
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        return data[:-1] if self.tears else data


fsspec.register_implementation("faulty", Faulty, clobber=True)
