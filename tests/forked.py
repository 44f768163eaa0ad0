"""Commands in processes of their own, forked from a server that has imported what they need already.

They have a working directory, an environment, pipes and signals like any other process, and start in
milliseconds. `Forked` is used as `subprocess.Popen` is; `programs` writes programs `etude` and `python` for
shells. None reaches the Hugging Face hub or draws the plot of the rewards, whose file is empty.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import etude

ROOT = Path(__file__).parents[1]

PRELOADED = (
    *("torch", "transformers", "transformers.models.llama.modeling_llama", "peft", "rich.live"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
    *("tests.several", "tests.cli.parts", "typer.rich_utils"),
)
"""Beside all rooms of Etude but its guests'."""

CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
tell = os.environ.pop({tell!r}, None)
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    request = {{"program": {program!r}, "arguments": sys.argv[1:], "folder": os.getcwd()}}
    request["environment"] = dict(os.environ)
    server.sendall(json.dumps(request).encode() + b"\\n")
    answers = server.makefile()
    pid = int(answers.readline())
    for number in signal.SIGTERM, signal.SIGINT, signal.SIGHUP:
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    if tell:
        os.write(int(tell), b"%d" % pid)
        os.close(int(tell))
    code = int(answers.readline())
if code >= 0:
    sys.exit(code)
if code != -signal.SIGKILL:
    signal.signal(-code, signal.SIG_DFL)
os.kill(os.getpid(), -code)
"""


_FOLDER = "ETUDE_TESTS_FORKED"
"""The folder of the server. The server ends with the process that made the folder."""
_TELL = "ETUDE_TESTS_TELL"
"""Where a client writes the process id of its command: a descriptor."""
_inputs: list[int] = []


class Forked:
    """`etude ARGUMENTS` in a forked process, with pipes: the `subprocess.Popen` of a client of the server.

    `pid`, signals and the exit code are the command's. With `program="python"` the arguments are
    Python's: a file, `-c CODE` or `-m MODULE` comes first. `errors` is a file for them, in place of the pipe.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        folder: Path,
        environment: dict[str, str],
        *,
        program: str = "etude",
        errors: Path | None = None,
    ) -> None:
        reading, writing = os.pipe()
        with contextlib.nullcontext(subprocess.PIPE) if errors is None else errors.open("ab") as place:
            self._client = subprocess.Popen(
                [str(programs() / program), *arguments],
                cwd=folder,
                env={**environment, _TELL: str(writing)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=place,
                encoding="utf-8",
                pass_fds=[writing],
            )
        os.close(writing)
        with os.fdopen(reading) as told:
            self.pid = int(told.read())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is over."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # It has ended meanwhile.
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def programs() -> Path:
    """A folder for PATH with programs `etude` and `python` in it."""
    folder = Path(address()).parent / f"bin-{os.getpid()}"
    folder.mkdir()
    for name in ("etude", "python"):
        client = folder / name
        client.write_text(CLIENT.format(python=sys.executable, address=address(), program=name, tell=_TELL))
        client.chmod(0o755)
    return folder


@functools.cache
def address() -> str:
    """Where the server listens. It is started when it is first asked for, and all workers share it."""
    folder = Path(os.environ.get(_FOLDER) or share())
    path = folder / "server"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _start(path)
    return str(path)


def share() -> str:
    """Make the folder of a server, for this process and for those that it starts."""
    folder = os.environ[_FOLDER] = tempfile.mkdtemp(prefix="etude-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.mkfifo(Path(folder) / "input")
    _inputs.append(os.open(Path(folder) / "input", os.O_RDWR))
    return folder


def _start(path: Path) -> None:
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with (path.parent / "input").open("rb") as input:
        server = subprocess.Popen(
            [sys.executable, "-m", "tests.forked", str(path)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
            stdin=input,
            stdout=subprocess.PIPE,
        )
    assert server.stdout is not None
    assert server.stdout.readline(), "the server did not start"


def main(path: str) -> None:
    """Serve until standard input ends."""
    gc.disable()  # Among modules there is nothing to collect.
    rooms = pkgutil.walk_packages(etude.__path__, "etude.", onerror=lambda name: None)
    own = [room.name for room in rooms if not room.name.startswith(("etude.integrations.", "etude.__main__"))]
    for name in (*PRELOADED, *own):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # What takes a small run long is made once for all: tables of components and of transformers' weights.
    importlib.import_module("etude.config.registry").load_entry_points()
    importlib.import_module("etude.show.metrics_files").render_reward_plot = lambda history: b""
    with contextlib.suppress(ImportError):
        importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
    gc.collect()
    gc.freeze()
    gc.enable()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # Nobody waits for those who wait for commands.
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                _watch(connection)
            connection.close()


def _watch(connection: socket.socket) -> NoReturn:
    """Fork a command, and say its process id and then its exit code.

    It does not outlive its client.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
    request = json.loads(connection.makefile().readline())
    child = os.fork()
    if child == 0:
        connection.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _run(request)
    for descriptor in (0, 1, *descriptors):
        os.close(descriptor)
    connection.sendall(f"{child}\n".encode())
    threading.Thread(target=_kill_with, args=(connection, child), daemon=True).start()
    connection.sendall(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())
    os._exit(0)


def _kill_with(connection: socket.socket, child: int) -> None:
    """Kill a command when the connection ends before it."""
    with contextlib.suppress(OSError):
        if not connection.recv(1):
            os.kill(child, signal.SIGKILL)


def _run(request: dict[str, Any]) -> NoReturn:
    code: Any = 1
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        searched = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [request["folder"], *(entry for entry in searched if entry not in sys.path)]
        # The server's own have other buffers.
        sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", encoding="utf-8")
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1)
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        _execute(request["program"], request["arguments"])
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
        if isinstance(exit.code, str):
            sys.stderr.write(f"{exit.code}\n")
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001  as the interpreter does
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def _execute(program: str, arguments: list[str]) -> None:
    """Do as the program does with its arguments."""
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    if os.environ.get("COVERAGE_PROCESS_START"):
        import coverage  # Environments of their own, as verifiers' is, do without it.

        coverage.process_startup(force=True)
        del os.environ["COVERAGE_PROCESS_START"]  # Its own children are not measured.
    sys.argv = [program, *arguments]
    if program == "etude":
        from etude.cli import main as etude

        etude()
        return
    first, *sys.argv = arguments
    if first == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        code, sys.argv[0] = sys.argv[0], "-c"
        exec(code, main.__dict__)
    else:
        sys.argv.insert(0, first)
        sys.path.insert(0, str(Path(first).absolute().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
