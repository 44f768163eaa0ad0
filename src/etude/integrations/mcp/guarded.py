"""Runs a command, and ends it with whoever started this: `python -I -S guarded.py COMMAND ARGUMENTS…`.

The command has this process's standard streams and process group. When the parent is gone, also by SIGKILL,
the whole group is killed; when the command ends, its exit code is noted on standard error and passed on. A
script of its own that imports little, because one runs beside every server.
"""

import os
import signal
import sys
import threading
import time

SECONDS = 0.5
"""How often it looks whether the parent is still there."""


def say(text: str) -> None:
    """Write a line to standard error."""
    os.write(2, f"{text}\n".encode())


def watch(parent: int) -> None:
    """Kill the process group when the parent is another one."""
    while os.getppid() == parent:
        time.sleep(SECONDS)
    os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run the command; its exit code, 128 and the number of the signal that ended it, or 127 without one."""
    parent = os.getppid()
    child = os.fork()
    if child == 0:
        try:
            os.execvp(command[0], command)
        except OSError as error:
            say(f"cannot start {command[0]}: {error.strerror}")
            os._exit(127)
    # Or the end of the streams would not be seen while this process holds them too.
    os.close(0)
    os.close(1)
    threading.Thread(target=watch, args=(parent,), daemon=True).start()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    ended = f"ended with exit code {code}" if code >= 0 else f"was ended by {signal.Signals(-code).name}"
    say(f"the server {ended}")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
