"""One run of `vllm serve`, from its start to its end: on this machine, or wherever a launcher puts it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pydantic import SecretStr

from etude.core.errors import EngineError
from etude.inference.child_process import (
    MaskedLog,
    end_of,
    last_exception,
    last_lines,
    start_guarded,
)
from etude.store.files import private_folder


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How to run vLLM."""

    folder: Path
    """For its log."""
    dtype: str
    """Always told: vLLM's own `auto` makes bfloat16 of float32 weights."""
    command: tuple[str, ...] = ("vllm",)
    arguments: tuple[str, ...] = ()
    """More of `vllm serve`'s options."""
    max_lora_rank: int = 64
    max_loras: int = 2
    """LoRA weights that one batch may mix."""
    start_seconds: float = 600.0
    """Compiling a model for the first time takes minutes."""
    look_seconds: float = 2.0
    """Between two looks at its health."""
    hung_seconds: float = 60.0
    """Without an answer about its health, after which it counts as hung."""
    attempts: int = 5
    """Starts in a row that may fail."""
    backoff_seconds: float = 1.0
    """Before the first restart; twice as long before each that follows, and a minute at most."""
    device: str = ""
    """Its device as people name it, where there are several processes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More variables of its environment, such as the one that names its device."""
    host: str = "127.0.0.1"
    """The address of this machine at which it listens."""


class VllmChild(Protocol):
    """A vLLM that was started."""

    base_url: str
    """Where it listens, or soon will."""
    where: str
    """The machine that it runs on; empty for this one."""
    pid: int

    async def ended(self, seconds: float) -> str | None:
        """How it ended, as `ended with code 1 (cause)`, if it does within so many seconds; else None."""

    async def end(self, *, politely: bool) -> None:
        """End it; `politely` gives it time to end by itself."""

    async def lora_path(self, name: str, folder: Path) -> str:
        """The path at which it finds LoRA weights that are in a folder here. Raises EngineError."""

    async def drop_lora(self, name: str) -> None:
        """Nobody needs the files of these LoRA weights any more."""

    async def printed(self) -> str:
        """The end of what it printed."""

    async def log_end(self) -> str:
        """The last lines that it printed, with where they are."""


class VllmLauncher(Protocol):
    """Starts vLLM somewhere."""

    async def launch(self, options: VllmOptions, source: str, key: SecretStr) -> VllmChild:
        """Start it; it does not answer yet. Raises EngineError."""


class LocalVllm(VllmChild):
    """A vLLM on this machine, in a process group of its own.

    It ends with this process, even with one that is killed. Its log goes on in `vllm.log` from one to the
    next.
    """

    where = ""

    def __init__(
        self,
        options: VllmOptions,
        process: asyncio.subprocess.Process,
        lifeline: int,
        port: int,
        log: MaskedLog,
    ) -> None:
        """The process group ends when the descriptor `lifeline` is closed."""
        self.base_url = f"http://{options.host}:{port}"
        self.pid = process.pid
        self._options = options
        self._process = process
        self._lifeline: int | None = lifeline
        self._log = log

    async def ended(self, seconds: float) -> str | None:
        """How it ended; when its engine fails, it exits with code 0, and only its log knows why."""
        if (code := await _exit_code(self._process, seconds)) is None:
            return None
        await self._log.settled()
        cause = last_exception(log_of(self._options), self._log.begin)
        how = f"ended with code {code}" if code else "ended by itself"
        return how + ("" if cause is None else f" ({cause})")

    async def end(self, *, politely: bool) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL) if politely else (signal.SIGKILL,):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            await _exit_code(self._process, 20.0)
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def lora_path(self, name: str, folder: Path) -> str:
        """The folder itself."""
        return str(folder)

    async def drop_lora(self, name: str) -> None:
        """Leave the folder to whoever wrote it."""

    async def printed(self) -> str:
        return await asyncio.to_thread(end_of, log_of(self._options), 2**18)

    async def log_end(self) -> str:
        """The last lines of its log."""
        log = log_of(self._options)
        lines = last_lines(log)
        return f"The last lines of {log}:\n{lines}" if lines else f"{log} is empty"


class LocalLauncher(VllmLauncher):
    """Starts vLLM on this machine."""

    async def launch(self, options: VllmOptions, source: str, key: SecretStr) -> LocalVllm:
        private_folder(options.folder)
        log_file = log_of(options)
        if log_file.exists() and log_file.stat().st_size > 20 * 2**20:
            log_file.replace(log_file.with_suffix(".log.1"))
        with socket.socket() as listening:
            listening.bind((options.host, 0))
            port = int(listening.getsockname()[1])
        with MaskedLog(log_file) as log:
            try:
                process, lifeline = await start_guarded(
                    *options.command,
                    *_arguments(options, source, port),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log.fileno(),
                    stderr=log.fileno(),
                    env={**os.environ, **_environment(key), **options.environment},
                )
            except OSError as error:
                raise EngineError(
                    f"'{options.command[0]}' cannot be started: {error.strerror}; install vLLM, or name its "
                    "program with --vllm-command"
                ) from error
        return LocalVllm(options, process, lifeline, port, log)


def log_of(options: VllmOptions) -> Path:
    """Everything that it printed, with secrets masked."""
    return options.folder / "vllm.log"


def _environment(key: SecretStr) -> dict[str, str]:
    """The variables by which it is told what must not be on a command line, or has no option."""
    # It has the module by which vLLM asks for its key at all of its paths.
    gate = str(Path(__file__).parent / "vllm_gate")
    paths = [gate, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    return {
        "VLLM_API_KEY": key.get_secret_value(),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        # For the paths by which weights are loaded in place; the gate guards them.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }


def _arguments(options: VllmOptions, source: str, port: int) -> Sequence[str]:
    return (
        *("serve", source, "--host", options.host, "--port", str(port), "--dtype", options.dtype),
        # Logprobs of the distribution that was sampled from, temperature included, as the learner takes them.
        *("--logprobs-mode", "processed_logprobs"),
        # The library that makes the masks of constraints for the learner, and reads the same grammars.
        *("--structured-outputs-config", '{"backend": "guidance"}'),
        "--disable-uvicorn-access-log",
        *("--middleware", "etude_vllm_gate.Gate"),
        *("--enable-lora", "--max-loras", str(options.max_loras)),
        *("--max-lora-rank", str(options.max_lora_rank)),
        *options.arguments,
    )


async def _exit_code(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    """The exit code of a process that ends within so many seconds; None of one that goes on."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
    return process.returncode
