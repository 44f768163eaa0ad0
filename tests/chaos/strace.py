"""The calls by which a command changes files, in their order and with their data, as strace sees them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_TRACED = (
    "open,openat,creat,write,pwrite64,writev,pwritev,pwritev2,truncate,ftruncate,fallocate,copy_file_range,"
    "sendfile,lseek,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,mkdir,mkdirat,rmdir,"
    "fsync,fdatasync,sync_file_range,mmap"
)
_LONGEST = 100_000_000
"""Bytes of a call's data."""

_LINE = re.compile(r"(\d+) +(\d+\.\d+) (.*)")
_UNFINISHED, _RESUMED = " <unfinished ...>", re.compile(r"<\.\.\. \w+ resumed>(.*)")
_CALL = re.compile(r"(\w+)\((.*)\) += (-?\d+)(?:<([^>]*)>)?(.*)")
_HEX = r"(?:\\x[0-9a-f]{2})*"
_FILE = re.compile(rf"^(\w+)<({_HEX})>(\(deleted\))?")
_TEXT = re.compile(rf'"({_HEX})"')


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the kernel that did not fail."""

    at: float
    """Unix seconds at which it began, or was over where others came between."""
    name: str
    arguments: str
    """As strace writes them, without strings."""
    number: int
    """That of the descriptor it was about; -1 for none."""
    file: str
    """The path behind the descriptor; empty where it has none any more."""
    texts: tuple[bytes, ...]
    """Paths and data, in their order."""
    result: int
    opened: str
    """The path behind the descriptor that it gave."""

    @property
    def last_number(self) -> int:
        """The last argument, or the one before it where that is no number."""
        return int(re.findall(r"(?:^|, )(-?\d+)(?=,|$)", self.arguments)[-1])


def traced(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], trace: Path, console: Path
) -> None:
    """Run a command, with its output in `console`. Raises SystemExit where it fails."""
    strace = ["strace", "-f", "-y", "-xx", "-ttt", "--seccomp-bpf", "-s", str(_LONGEST), "-o", str(trace)]
    with console.open("wb") as output:
        done = subprocess.run(
            [*strace, "-e", f"trace={_TRACED}", *command],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"the run under strace fails: {done.stderr.decode()[-2000:]}")


def calls_of(trace: Path) -> Iterator[Call]:
    """The calls in the order in which they were over."""
    begun: dict[str, str] = {}
    with trace.open(encoding="ascii") as lines:
        for line in lines:
            match = _LINE.fullmatch(line.rstrip("\n"))
            if match is None:
                raise SystemExit(f"strace wrote what is not known: {line[:200]}")
            thread, at, text = match.groups()
            if text.endswith(_UNFINISHED):
                begun[thread] = text.removesuffix(_UNFINISHED)
                continue
            if resumed := _RESUMED.fullmatch(text):
                text = begun.pop(thread) + resumed[1]
            if call := _call(float(at), text):
                yield call


def _call(at: float, text: str) -> Call | None:
    match = _CALL.fullmatch(text)
    if match is None or int(match[3]) < 0:
        return None  # A signal, an end, or a call that failed.
    name, arguments, result, opened, _ = match.groups()
    file = _FILE.match(arguments)
    is_open = file is not None and file[1].isdigit()
    return Call(
        at=at,
        name=name,
        arguments=_TEXT.sub("", arguments),
        number=int(file[1]) if file and is_open else -1,
        file="" if file is None or file[3] else _bytes(file[2]).decode(errors="surrogateescape"),
        texts=tuple(_bytes(each) for each in _TEXT.findall(arguments)),
        result=int(result),
        opened=_bytes(opened or "").decode(errors="surrogateescape"),
    )


def _bytes(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))
