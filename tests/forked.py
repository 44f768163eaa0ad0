"""Python in processes of their own, forked from a server that has imported what they need already.

They have a working directory, an environment, pipes and signals like any other process, and start in
milliseconds: `python -m etude` spends seconds on its imports. `Forked` is used as `subprocess.Popen` is;
`programs` has `etude` and `python` for shells. None of them reaches the Hugging Face hub. What is about
start-up itself takes a real process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
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

ROOT = Path(__file__).parents[1]

PRELOADED = ("etude.components", "etude.cli.app", "matplotlib.figure", "matplotlib.backends.backend_agg")
HEAVY = ("torch", "transformers", "transformers.models.llama.modeling_llama", "peft")

CLIENT = """\
#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b"."], [0, 1, 2])
    request = {{"arguments": [*{before!r}, *sys.argv[1:]]}}
    request |= {{"folder": os.getcwd(), "environment": dict(os.environ)}}
    server.sendall(json.dumps(request).encode() + b"\\n")
    code = int(server.makefile().read().split()[-1])
sys.exit(code if code >= 0 else 128 - code)
"""


class Forked:
    """`python ARGUMENTS` in a forked process, with pipes; as much of `subprocess.Popen` as tests use."""

    def __init__(self, arguments: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self.args = ["python", *arguments]
        self.returncode: int | None = None
        nothing, (output, out), (errors, err) = os.open(os.devnull, os.O_RDONLY), os.pipe(), os.pipe()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.connect(address())
        socket.send_fds(self._server, [b"."], [nothing, out, err])
        for descriptor in (nothing, out, err):
            os.close(descriptor)
        self.stdout = os.fdopen(output, encoding="utf-8")
        self.stderr = os.fdopen(errors, encoding="utf-8")
        request = {"arguments": list(arguments), "folder": str(folder), "environment": environment}
        self._server.sendall(json.dumps(request).encode() + b"\n")
        self._answers = self._server.makefile()
        self.pid = int(self._answers.readline())

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What is left of both outputs, once the process is over."""
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
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def programs() -> Path:
    """A folder for PATH with the programs `etude` and `python` in it."""
    folder = Path(address()).parent / "bin"
    folder.mkdir()
    for name, before in (("etude", ["-m", "etude"]), ("python", [])):
        client = folder / name
        client.write_text(CLIENT.format(python=sys.executable, address=address(), before=before))
        client.chmod(0o755)
    return folder


@functools.cache
def address() -> str:
    """Where the server listens; it is started when it is first asked for, and ends with this process."""
    path = Path(tempfile.mkdtemp(prefix="etude-")) / "server"
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.forked", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert server.stdout is not None
    assert server.stdout.readline(), "the server did not start"
    atexit.register(server.kill)
    return str(path)


def main(path: str) -> None:
    """Serve until standard input ends."""
    for name in (*PRELOADED, *HEAVY):
        __import__(name)
    gc.collect()
    gc.freeze()
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
    """Fork a command, and say its process id and then its exit code."""
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
    over = os.pidfd_open(child)
    if connection in select.select([connection, over], [], [])[0]:
        os.kill(child, signal.SIGTERM)  # Whoever waited for it was ended.
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with contextlib.suppress(BrokenPipeError):
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


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
        _python(*request["arguments"])
        code = 0
    except SystemExit as exit:
        code = exit.code if isinstance(exit.code, int) else 0 if exit.code is None else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001  as Python itself reports it
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError


def _python(first: str, *rest: str) -> None:
    """As `python -m MODULE …`, `python -c CODE …` or `python FILE …`."""
    sys.argv = [first, *rest[1:]] if first in ("-m", "-c") else [first, *rest]
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(main))
    else:
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
