"""A terminal to run commands in: one types, and sees what is left on the screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

from tests.cli.projects import ROOT

_TOKEN = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|(.)", re.DOTALL)


class Terminal:
    """A process on a pseudo-terminal of its own."""

    def __init__(self, *arguments: Any, folder: Path, columns: int = 80) -> None:
        self._columns = columns
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment |= {"TERM": "xterm", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "etude", *map(str, arguments)],
            cwd=folder,
            env=environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            preexec_fn=_take_terminal,
        )
        os.close(slave)
        self.output = ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def read(self, seconds: float, text: str = "") -> None:
        """Read for so long, or until `text` is there, or until the process is over."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not (text and text in self.output):
            if select.select([self._master], [], [], 0.02)[0]:
                try:
                    self.output += os.read(self._master, 65536).decode(errors="replace")
                except OSError:  # Everybody on the other side has gone.
                    return

    def read_until(self, text: str, seconds: float = 60) -> None:
        """Read until `text` is there. It must come."""
        self.read(seconds, text)
        assert text in self.output, f"{text!r} did not come:\n{self.output[-2000:]}"

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)

    def screen(self) -> list[str]:
        """The lines that can be read when all of the output has been written."""
        lines, row, column = [[]], 0, 0
        for argument, order, letter in _TOKEN.findall(self.output):
            if order == "A":
                row = max(0, row - int(argument or 1))
            elif order == "K":
                lines[row] = [] if argument == "2" else lines[row][:column]
            elif letter == "\r":
                column = 0
            elif letter == "\n":
                row += 1
            elif letter and letter.isprintable():
                if column == self._columns:
                    row, column = row + 1, 0
                while len(lines) <= row:
                    lines.append([])
                lines[row] += [" "] * (column + 1 - len(lines[row]))
                lines[row][column] = letter
                column += 1
            while len(lines) <= row:
                lines.append([])
        return ["".join(line).rstrip() for line in lines]


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
