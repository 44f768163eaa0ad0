"""The end of a program that has torch in it, without a last search for cyclic garbage."""

from __future__ import annotations

import atexit
import gc
import io
import sys
from contextlib import suppress

_ANY_FILE = io.IOBase.__mro__[1]
"""The class of all files that is no ABC: whether an object is of it is seen at once."""
_BUFFERED = (io.BufferedWriter, io.BufferedRandom, io.BufferedRWPair)


def end_quickly() -> None:
    """Have the interpreter end without a look through all objects; a program calls it first.

    Python looks through them twice for what is part of a cycle: with torch and transformers that took 0.5
    to 0.9 s of CPU time, after the last line was printed. The system takes back all that it would
    find, but for what files have not written yet, and that is written here.
    """
    atexit.register(_leave)


def _leave() -> None:
    """Write what open files hold, as their finalisers would, and take all objects out of sight."""
    gc.unfreeze()
    files = [value for value in gc.get_objects() if issubclass(type(value), _ANY_FILE)]
    texts = [file for file in files if isinstance(file, io.TextIOWrapper)]
    others = [file for file in files if type(file).__module__ != "_io" and file not in texts]
    # From the outermost in: a text goes to an archive, and the archive's end to its file.
    for finish in (
        *(text.flush for text in texts),
        *(file.close for file in others if file not in (sys.stdout, sys.stderr)),
        *(file.flush for file in files if isinstance(file, _BUFFERED)),
    ):
        # Closed, full, refused: a finaliser keeps it to itself too, and nobody is left to tell.
        with suppress(Exception):
            finish()
    gc.freeze()
