"""Starting, killing and asking a real server process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import coverage
import httpx
import openai

_HERE = Path(__file__).parent


class ServerProcess:
    """`etude serve` in a process of its own; `with` starts and stops it."""

    def __init__(self, model: Path, data_dir: Path, *options: str, key: str | None = None) -> None:
        self.data_dir = data_dir
        self.key = key
        self._command = [sys.executable, *_measured(), "-m", "etude", "serve", str(model), "--port", "0"]
        self._command += ["--data-dir", str(data_dir), *options]
        self._process: subprocess.Popen[str] | None = None
        self.address = ""

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when requests are answered."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        if self.key is not None:
            environment["SERVER_TEST_KEY"] = self.key
            self._command += ["--api-key-env", "SERVER_TEST_KEY"]
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=self.log.open("a"), text=True, env=environment
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert " at http://" in line, self.log.read_text()
        self.address = line.split(" at ")[1].split("/v1")[0]

    @property
    def log(self) -> Path:
        return self.data_dir / "stderr.log"

    @property
    def is_running(self) -> bool:
        return self._process is not None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, and wait for the end; the exit code."""
        return self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.send_signal(number)
        code = process.wait(timeout=60)
        assert process.stdout is not None
        process.stdout.close()
        return code

    def terminate(self) -> subprocess.Popen[str]:
        """SIGTERM, without waiting."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, which does not try again unless it is told to."""
        options = {"api_key": self.key or "none", "max_retries": 0, "timeout": 60.0} | options
        return openai.OpenAI(base_url=f"{self.address}/v1", **options)

    def async_client(self, **options: Any) -> openai.AsyncOpenAI:
        options = {"api_key": self.key or "none", "max_retries": 0, "timeout": 60.0} | options
        return openai.AsyncOpenAI(base_url=f"{self.address}/v1", **options)

    def raw(self, request: bytes) -> bytes:
        """The first line of the answer to bytes that no client would send."""
        host, port = self.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(request)
            return connection.recv(4096).split(b"\r\n")[0]

    def http(self, **options: Any) -> httpx.Client:
        """A plain client, for what the SDK does not do."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.address, headers=headers | options.pop("headers", {}), **options)


def _measured() -> list[str]:
    """Python's options for measuring the server's coverage, where that of the tests is measured."""
    if coverage.Coverage.current() is None:
        return []
    data = _HERE.parents[1] / ".coverage"
    return ["-m", "coverage", "run", f"--rcfile={_HERE / 'coverage.ini'}", f"--data-file={data}"]
