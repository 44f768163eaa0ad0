"""A disk that keeps what it was told to sync, and of the rest what chance leaves: files and names apart.

By POSIX a file's content is on the disk once the file was synced, and a name (made, changed or deleted) once
its folder was. Nothing else is promised, and a journaling file system keeps its order of names at most.
"""

from __future__ import annotations

import os
import random
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from tests.chaos.strace import Call

_SECTOR = 512
_LONGEST_PATH = 4096

Loss: TypeAlias = Literal["all", "content", "names", "some"]
"""Of what was not synced: everything, contents of files, names, or sectors and the latest names by chance."""


@dataclass(eq=False)
class Node:
    """A file or a folder, as it is and as it is on the disk."""

    is_folder: bool
    content: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    unsynced: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes since then: where, and what; nothing for a new length."""
    names: dict[str, Node] = field(default_factory=dict)
    synced_names: dict[str, Node] = field(default_factory=dict)


Naming: TypeAlias = tuple[tuple[Node, str, Node | None], ...]
"""Names of folders that change at once: what each stands for then."""


class Disk:
    """The files under a folder, followed call by call."""

    def __init__(self, folder: Path, name: str) -> None:
        """Of what is in `folder` only that of the name `name`, which is not there yet, is followed."""
        self._folder, self._name = folder, name
        self._root = Node(is_folder=True)
        self._unsynced: list[Naming] = []
        self._places: dict[tuple[int, Node], int] = {}
        """Where in a file the next `write` goes, by descriptor."""
        self._appending: set[tuple[int, Node]] = set()

    def follow(self, call: Call) -> bool:
        """Do what a call did; whether it was a sync of something here. Raises SystemExit for unknown ones."""
        name = call.name.removesuffix("64").removesuffix("at2")
        method = getattr(self, f"_{name.removesuffix('at')}", None)
        if method is not None:
            return bool(method(call))
        paths = [call.file, *(os.fsdecode(text) for text in call.texts if len(text) < _LONGEST_PATH)]
        flags = {*re.split(r"[|, ]+", call.arguments)}
        is_shared = call.name != "mmap" or {"MAP_SHARED", "PROT_WRITE"} <= flags
        if is_shared and any(self._find(path) for path in paths if not path.endswith("-shm")):
            raise SystemExit(f"{call.name} of {call.file} is not followed: {call.arguments}")
        return False

    def is_about(self, call: Call) -> bool:
        """Whether a call is about files that are followed."""
        paths = [call.file, call.opened, *(os.fsdecode(text) for text in call.texts[:2])]
        return any(path and self._parts(path) is not None for path in paths if len(path) < _LONGEST_PATH)

    def write_to(self, folder: Path, loss: Loss, choice: random.Random) -> None:
        """Make the files as they may be after the power went. `folder` is not there, or has no such name."""
        kept = {node: {**node.synced_names} for node in self._all()}
        pending = self._unsynced if loss == "content" else []
        if loss == "some":
            pending = self._unsynced[: choice.randint(0, len(self._unsynced))]
        for naming in pending:
            for parent, name, node in naming:
                _set(kept.setdefault(parent, {}), name, node)
        top = kept[self._root].get(self._name)
        if top is not None:
            _make(top, folder / self._name, kept, loss, choice)

    def is_as(self, folder: Path) -> list[str]:
        """Paths that are not as they are in `folder`: a check of what was followed."""
        expected = dict(_files(self._root, Path()))
        there = {
            path.relative_to(folder): path.read_bytes()
            for path in (folder / self._name).rglob("*")
            if path.is_file()
        }
        paths = expected.keys() | there.keys()
        return sorted(str(path) for path in paths if expected.get(path) != there.get(path))

    def _all(self) -> set[Node]:
        found, left = {self._root}, [self._root]
        while left:
            node = left.pop()
            nodes = {*node.names.values(), *node.synced_names.values()} - found
            found |= nodes
            left += nodes
        return found | {node for naming in self._unsynced for _, _, node in naming if node} - {self._root}

    def _parts(self, path: str) -> tuple[str, ...] | None:
        """The names of a path from the folder on; None for paths elsewhere."""
        absolute = Path(os.path.normpath(self._folder / path))
        if not absolute.is_relative_to(self._folder / self._name):
            return None
        return absolute.relative_to(self._folder).parts

    def _find(self, path: str) -> Node | None:
        parts, node = self._parts(path), self._root
        if not path or parts is None:
            return None
        for part in parts:
            if part not in node.names:
                return None
            node = node.names[part]
        return node

    def _parent(self, path: str) -> tuple[Node, str] | None:
        parts = self._parts(path)
        if not parts:
            return None
        node = self._root
        for part in parts[:-1]:
            node = node.names[part]
        return node, parts[-1]

    def _rename_all(self, naming: Naming) -> None:
        for parent, name, node in naming:
            _set(parent.names, name, node)
        self._unsynced.append(naming)

    def _openat(self, call: Call) -> None:
        self._open(call)

    def _open(self, call: Call) -> None:
        place = self._parent(call.opened)
        if place is None:
            return
        parent, name = place
        if name not in parent.names:
            if "O_CREAT" not in call.arguments:
                return
            self._rename_all(((parent, name, Node(is_folder=False)),))
        node = parent.names[name]
        if node.is_folder:
            return
        if "O_TRUNC" in call.arguments:
            self._cut(node, 0)
        key = call.result, node
        self._places[key] = 0
        (self._appending.add if "O_APPEND" in call.arguments else self._appending.discard)(key)

    def _lseek(self, call: Call) -> None:
        if (node := self._find(call.file)) is not None:
            self._places[call.number, node] = call.result

    def _write(self, call: Call) -> None:
        node = self._find(call.file)
        if node is None:
            return
        key, data = (call.number, node), b"".join(call.texts)[: call.result]
        place = len(node.content) if key in self._appending else self._places[key]
        self._put(node, place, data)
        self._places[key] = place + len(data)

    _writev = _write

    def _pwrite(self, call: Call) -> None:
        if (node := self._find(call.file)) is not None:
            self._put(node, call.last_number, b"".join(call.texts)[: call.result])

    def _put(self, node: Node, place: int, data: bytes) -> None:
        _write_at(node.content, place, data)
        node.unsynced.append((place, data))

    def _cut(self, node: Node, length: int) -> None:
        _resize(node.content, length)
        node.unsynced.append((length, None))

    def _ftruncate(self, call: Call) -> None:
        if (node := self._find(call.file)) is not None:
            self._cut(node, call.last_number)

    def _truncate(self, call: Call) -> None:
        if (node := self._find(os.fsdecode(call.texts[0]))) is not None:
            self._cut(node, call.last_number)

    def _fsync(self, call: Call) -> bool:
        node = self._find(call.file)
        if node is None and Path(call.file) == self._folder:
            node = self._root
        if node is None:
            return False
        node.synced, node.unsynced = bytes(node.content), []
        later = []
        for naming in self._unsynced:
            if any(parent is node for parent, _, _ in naming):
                for parent, name, named in naming:
                    _set(parent.synced_names, name, named)
            else:
                later.append(naming)
        self._unsynced = later
        return True

    _fdatasync = _fsync

    def _mkdir(self, call: Call) -> None:
        place = self._parent(self._path(call, 0))
        if place is not None:
            self._rename_all(((*place, Node(is_folder=True)),))

    def _unlink(self, call: Call) -> None:
        place = self._parent(self._path(call, 0))
        if place is not None:
            self._rename_all(((*place, None),))

    _rmdir = _unlink

    def _rename(self, call: Call) -> None:
        old, new = self._parent(os.fsdecode(call.texts[0])), self._parent(os.fsdecode(call.texts[1]))
        if old is None or new is None:
            if (old or new) is not None:
                raise SystemExit(f"a file is moved in or out: {call}")
            return
        self._rename_all(((*old, None), (*new, old[0].names[old[1]])))

    def _path(self, call: Call, index: int) -> str:
        """That of a call, which may be relative to an open folder."""
        return str(Path(call.file if call.name.endswith("at") else "", os.fsdecode(call.texts[index])))


def _set(names: dict[str, Node], name: str, node: Node | None) -> None:
    if node is None:
        names.pop(name, None)
    else:
        names[name] = node


def _resize(content: bytearray, length: int) -> None:
    if length < len(content):
        del content[length:]
    else:
        content.extend(bytes(length - len(content)))


def _write_at(content: bytearray, place: int, data: bytes) -> None:
    if place > len(content):
        _resize(content, place)
    content[place : place + len(data)] = data


def _files(node: Node, path: Path) -> list[tuple[Path, bytes]]:
    if not node.is_folder:
        return [(path, bytes(node.content))]
    return [each for name, inner in node.names.items() for each in _files(inner, path / name)]


def _make(
    node: Node, path: Path, kept: dict[Node, dict[str, Node]], loss: Loss, choice: random.Random
) -> None:
    if not node.is_folder:
        path.write_bytes(_content(node, loss, choice))
        path.chmod(0o600)
        return
    path.mkdir(mode=0o700)
    for name, inner in kept.get(node, {}).items():
        _make(inner, path / name, kept, loss, choice)


def _content(node: Node, loss: Loss, choice: random.Random) -> bytes:
    if loss == "names":
        return bytes(node.content)
    content = bytearray(node.synced)
    for place, data in node.unsynced if loss == "some" else ():
        if data is None:
            if choice.random() < 0.5:
                _resize(content, place)
            continue
        end = place + len(data)
        edges = [place, *range((place // _SECTOR + 1) * _SECTOR, end, _SECTOR), end]
        for first, last in pairwise(edges):
            if choice.random() < 0.5:
                _write_at(content, first, data[first - place : last - place])
    return bytes(content)
