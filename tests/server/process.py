"""Starting, killing and asking a real server process."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any

import coverage
import httpx
import openai

from tests.forked import Forked

_HERE = Path(__file__).parent


class ServerProcess:
    """`etude serve` in a process of its own; `with` starts and stops it."""

    def __init__(self, model: Path, data_dir: Path, *options: str, key: str | None = None) -> None:
        self.data_dir = data_dir
        self.key = key
        self._command = ["serve", str(model), "--port", "0", "--data-dir", str(data_dir), *options]
        self._process: Forked | None = None
        self.address = ""

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def start(self) -> None:
        """Returns when requests are answered."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | _coverage()
        if self.key is not None:
            environment["SERVER_TEST_KEY"] = self.key
            self._command += ["--api-key-env", "SERVER_TEST_KEY"]
        self._process = Forked(self._command, Path.cwd(), environment, errors=self.log)
        line = self._process.stdout.readline()
        assert " at http://" in line, self.log.read_text()
        self.address = line.split(" at ")[1].split("/v1")[0]

    @property
    def log(self) -> Path:
        return self.data_dir / "stderr.log"

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
        process.stdout.close()
        return code

    def terminate(self) -> Forked:
        """SIGTERM, without waiting."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process

    def client(self, **options: Any) -> openai.OpenAI:
        """The official client, which does not try again unless it is told to."""
        options = {"api_key": self.key or "none", "max_retries": 0, "timeout": 60.0} | options
        return openai.OpenAI(base_url=f"{self.address}/v1", **options)

    def raw(self, request: bytes) -> bytes:
        """The first line of the answer to bytes that no client would send."""
        host, port = self.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(request)
            return connection.recv(4096).split(b"\r\n")[0]

    def http(self, **options: Any) -> httpx.Client:
        """A plain client, for what the SDK does not do."""
        headers = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.address, headers=headers | options.pop("headers", {}), **options)


def _coverage() -> dict[str, str]:
    """The environment for measuring the server's coverage, where the tests' is."""
    if coverage.Coverage.current() is None:
        return {}
    data = str(_HERE.parents[1] / ".coverage")
    return {"COVERAGE_PROCESS_START": str(_HERE / "coverage.ini"), "COVERAGE_FILE": data}
