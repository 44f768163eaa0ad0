"""Commands in processes of their own, forked from a server that has imported what they need already.

They have a working directory, an environment, pipes and signals like any other process, and start in
milliseconds: `python -m etude` spends seconds on its imports. `Forked` is used as `subprocess.Popen` is;
`program` writes programs `etude` and `python` for shells. None of them reaches the Hugging Face hub, and none
draws the plot of the rewards, which is half of a small run: its file is empty. What is about start-up itself,
or the picture, takes a real process.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
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
import weakref
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
"""Beside all rooms of Etude but those of its guests."""

CLIENT = """\
#!{python} -IS
import json, os, signal, socket, sys
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
    code = int(answers.readline())
sys.exit(code if code >= 0 else 128 - code)
"""


_FOLDER = "ETUDE_TESTS_FORKED"
"""The folder of the server. The server ends with the process that made the folder."""
_inputs: list[int] = []
started: weakref.WeakSet[Forked] = weakref.WeakSet()


class Forked:
    """`etude ARGUMENTS` in a forked process, with pipes; as much of `subprocess.Popen` as tests use.

    With `program="python"` the arguments are those of Python: a file, `-c CODE` or `-m MODULE` comes first.
    `errors` is a file for them, in place of the pipe.
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
        self.args = [program, *arguments]
        self.returncode: int | None = None
        nothing, (output, out), (input, err) = os.open(os.devnull, os.O_RDONLY), os.pipe(), os.pipe()
        if errors is not None:
            os.close(err)
            err = os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(address())
        socket.send_fds(self._server, [b"."], [nothing, out, err])
        for descriptor in (nothing, out, err):
            os.close(descriptor)
        self.stdout = os.fdopen(output, encoding="utf-8")
        self.stderr = os.fdopen(input, encoding="utf-8")
        request = {"program": program, "arguments": list(arguments), "folder": str(folder)}
        request["environment"] = environment
        self._server.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._server.makefile()
        self.pid = int(self._answers.readline())
        started.add(self)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """The rest of both outputs, once the process is over."""
        texts = {}

        def read(name: str) -> None:
            texts[name] = getattr(self, name).read()

        readers = [threading.Thread(target=read, args=[name], daemon=True) for name in ("stdout", "stderr")]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join(timeout)
        self.stdout.close()
        self.stderr.close()
        return texts["stdout"], texts["stderr"]

    def poll(self) -> int | None:
        """The exit code; None while the process runs."""
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, negative for a signal. Raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._server], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = int(self._answers.readline())
            self._answers.close()
            self._server.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is over."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # It has ended meanwhile.
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def program() -> Path:
    """A folder for PATH with programs `etude` and `python` in it."""
    folder = Path(address()).parent / f"bin-{os.getpid()}"
    folder.mkdir()
    for name in ("etude", "python"):
        client = folder / name
        client.write_text(CLIENT.format(python=sys.executable, address=address(), program=name))
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
    rooms = [
        name for _, name, _ in pkgutil.walk_packages(etude.__path__, "etude.", onerror=lambda name: None)
    ]
    own = [name for name in rooms if not name.startswith(("etude.integrations.", "etude.__main__"))]
    for name in (*PRELOADED, *own):
        with contextlib.suppress(ImportError):
            __import__(name)
    _make_tables()
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


def _make_tables() -> None:
    """Make what takes a small run long, once for all: tables of components and of transformers' weights."""
    import etude.show.metrics_files
    from etude.config import registry

    registry.load_entry_points()
    etude.show.metrics_files.render_reward_plot = lambda history: b""
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


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
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    connection.sendall(f"{code}\n".encode())
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
