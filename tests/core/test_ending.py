"""The end of a program: what was written is there, and nothing is looked through."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import gzip, sys
from etude.core.ending import end_quickly

end_quickly()
folder = sys.argv[1]

class Log:
    # A class is part of a cycle: only the collector would find its files.
    plain = open(folder + "/plain", "w")
    raw = open(folder + "/raw", "wb")
    packed = gzip.open(folder + "/packed", "wt")
    full = open("/dev/full", "w")

    def __del__(self):
        print("looked through")

log = Log()
log.itself = log
for file in (Log.plain, Log.packed, Log.full):
    file.write("all of it")
Log.raw.write(b"all of it")
print("last line")
"""


def test_files_are_whole_that_only_the_collector_would_have_closed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout == "last line\n"
    assert done.stderr == ""
    assert (tmp_path / "plain").read_text() == "all of it"
    assert (tmp_path / "raw").read_bytes() == b"all of it"
    assert gzip.decompress((tmp_path / "packed").read_bytes()) == b"all of it"
