"""A `vllm serve` process: started, watched, restarted when it crashes or hangs, and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import httpx
from pydantic import SecretStr

from etude.core.errors import EngineAway, EngineError
from etude.inference.child_process import guard_of, kill_marked, last_exception, last_lines, mark_process

_LOG = logging.getLogger("etude.vllm")

State: TypeAlias = Literal["stopped", "starting", "running", "restarting", "failed"]

_LARGEST_LOG = 20 * 2**20
_GRACE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """How to run vLLM."""

    folder: Path
    """For its log and its mark."""
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


@dataclass(slots=True, eq=False)
class VllmProcess:
    """One vLLM at a time, serving one model and any LoRA weights for it, on a loopback port.

    Its LoRA weights are loaded anew after a restart. It is in a process group of its own, and its log goes
    on in `vllm.log` from one process to the next. It ends with this process, even with one that is killed;
    what was left running all the same is killed first.
    """

    options: VllmOptions
    source: str = ""
    state: State = "stopped"
    reason: str = ""
    """Why it is restarting or failed, with the log's last lines."""
    restarts: int = 0
    port: int = 0
    key: SecretStr = field(default_factory=lambda: SecretStr(secrets.token_urlsafe(24)))
    _process: asyncio.subprocess.Process | None = None
    _guard: asyncio.subprocess.Process | None = None
    _log_start: int = 0
    """Bytes of the log before those of the process."""
    _watching: asyncio.Task[None] | None = None
    _loras: dict[str, Path] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified of each change of its state."""
    _client: httpx.AsyncClient | None = None

    @property
    def base_url(self) -> str:
        """Where it listens; another port after each start."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Those that its requests need."""
        return {"authorization": f"Bearer {self.key.get_secret_value()}"}

    @property
    def pid(self) -> int | None:
        """Of the process, where one runs."""
        return None if self._process is None else self._process.pid

    @property
    def log(self) -> Path:
        """Everything that it printed."""
        return self.options.folder / "vllm.log"

    async def start(self, source: str) -> None:
        """Serve `source`; returns when requests are answered. Raises EngineError when it does not start."""
        if self.serves(source):
            await self.ready(self.options.start_seconds)
            return
        await self.stop()
        self.source = source
        await self._set("starting")
        try:
            await self._spawn()
        except BaseException as error:
            failed = isinstance(error, EngineError)
            await self._set("failed" if failed else "stopped", str(error) if failed else "")
            raise
        await self._set("running")
        self._watching = asyncio.create_task(self._watch(), name="watch vllm")

    def serves(self, source: str) -> bool:
        """Whether it runs with a model, or soon will again by itself."""
        return self._watching is not None and not self._watching.done() and self.source == source

    async def stop(self) -> None:
        """End the process; its LoRA weights are forgotten."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
            self._watching = None
        await self._end()
        if self._client is not None:
            await self._client.aclose()
            self._client = None
        self._loras.clear()
        await self._set("stopped")

    async def ready(self, seconds: float) -> None:
        """Wait until requests are answered. Raises EngineAway when they are not to be, or not in time."""
        try:
            async with asyncio.timeout(seconds), self.changed:
                await self.changed.wait_for(lambda: self.state not in ("starting", "restarting"))
        except TimeoutError as error:
            raise EngineAway(f"vLLM is not back after {seconds:g} s; /engine/status says why") from error
        if self.state != "running":
            raise EngineAway("vLLM does not run; /engine/status says why")

    async def add_lora(self, name: str, folder: Path) -> None:
        """Load LoRA weights (the absolute path of a folder that peft writes) under a name never used before.

        Raises EngineError when vLLM refuses them.
        """
        # Never `load_inplace`: that reads the folder again at every step, and changes answers half-way.
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})
        self._loras[name] = folder

    async def remove_lora(self, name: str) -> None:
        """Unload LoRA weights; those that are not loaded are no error."""
        if self._loras.pop(name, None) is not None and self.state == "running":
            with contextlib.suppress(EngineError):
                await self._post("/v1/unload_lora_adapter", {"lora_name": name})

    async def _post(self, path: str, body: Mapping[str, str]) -> None:
        try:
            reply = await self._http().post(
                f"{self.base_url}{path}", json=dict(body), headers=self.headers, timeout=120
            )
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM does not answer at {path}: {type(error).__name__}") from error
        if reply.status_code != httpx.codes.OK:
            raise EngineError(f"vLLM refused {path} with {reply.status_code}: {reply.text[:300]}")

    async def _spawn(self) -> None:
        """Start the process, and wait until it is healthy. Raises EngineError; then there is none."""
        try:
            process, seconds = await self._launch(), self.options.start_seconds
            end = time.monotonic() + seconds
            while not await self._is_healthy():
                if (code := await _exit_code(process, 0.25)) is not None:
                    raise EngineError(f"{self._exit(code, ' at its start')}. {self._log_end()}")
                if time.monotonic() > end:
                    raise EngineError(f"vLLM did not start in {seconds:g} s. {self._log_end()}")
        except BaseException:
            # It has nothing to finish yet, and takes minutes to notice that it should end.
            await self._end(politely=False)
            raise

    async def _launch(self) -> asyncio.subprocess.Process:
        options = self.options
        options.folder.mkdir(parents=True, exist_ok=True)
        kill_marked(self._mark)
        if self.log.exists() and self.log.stat().st_size > _LARGEST_LOG:
            self.log.replace(self.log.with_suffix(".log.1"))
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self.port = int(listening.getsockname()[1])
        environment = {
            "VLLM_API_KEY": self.key.get_secret_value(),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *options.command,
                    *_arguments(options, self.source, self.port),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                    env={**os.environ, **environment, **options.environment},
                )
            except OSError as error:
                raise EngineError(
                    f"'{options.command[0]}' cannot be started: {error.strerror}; install vLLM, or name its "
                    "program with --vllm-command"
                ) from error
        self._guard = await guard_of(self._process.pid)
        mark_process(self._mark, self._process.pid)
        return self._process

    @property
    def _mark(self) -> Path:
        return self.options.folder / "vllm.pid"

    async def _is_healthy(self) -> bool:
        seconds = min(10.0, self.options.hung_seconds)
        try:
            reply = await self._http().get(f"{self.base_url}/health", timeout=seconds)
        except httpx.HTTPError:
            return False
        return reply.status_code == httpx.codes.OK

    def _http(self) -> httpx.AsyncClient:
        """Kept from one look to the next: making a client takes tens of milliseconds of the event loop."""
        if self._client is None:
            self._client = httpx.AsyncClient()
        return self._client

    async def _watch(self) -> None:
        while True:
            trouble = await self._trouble()
            self.restarts += 1
            await self._set("restarting", f"{trouble}. {self._log_end()}")
            _LOG.error("%s", self.reason)
            await self._end(politely=False)
            if not await self._restart():
                return

    async def _trouble(self) -> str:
        """Wait for something to go wrong; gives it in words."""
        process, seen = self._process, time.monotonic()
        assert process is not None
        while (code := await _exit_code(process, self.options.look_seconds)) is None:
            if await self._is_healthy():
                seen = time.monotonic()
            elif time.monotonic() - seen > self.options.hung_seconds:
                return f"vLLM did not answer for {self.options.hung_seconds:g} s"
        return self._exit(code)

    async def _restart(self) -> bool:
        """Start it again, several times if need be; whether it runs then."""
        for attempt in range(self.options.attempts):
            await asyncio.sleep(min(60.0, self.options.backoff_seconds * 2**attempt))
            try:
                await self._spawn()
                for name, folder in list(self._loras.items()):
                    await self.add_lora(name, folder)
            except EngineError as error:
                await self._end()
                await self._set("restarting", str(error))
                _LOG.error("%s", error)
            else:
                await self._set("running")
                _LOG.warning("vLLM runs again, after %d restart(s)", self.restarts)
                return True
        tried = f"vLLM was started {self.options.attempts} times in vain; start it with POST /engine/start"
        await self._set("failed", f"{tried}. {self.reason}")
        return False

    async def _end(self, *, politely: bool = True) -> None:
        """End the process group; `politely` gives it time to end by itself."""
        process, self._process = self._process, None
        if process is None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL) if politely else (signal.SIGKILL,):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            await _exit_code(process, _GRACE_SECONDS)
        guard, self._guard = self._guard, None
        if guard is not None:
            with contextlib.suppress(ProcessLookupError):
                guard.kill()
            await guard.wait()
        self._mark.unlink(missing_ok=True)

    async def _set(self, state: State, reason: str = "") -> None:
        async with self.changed:
            self.state, self.reason = state, reason
            self.changed.notify_all()

    def _exit(self, code: int, when: str = "") -> str:
        """That it ended, and why, as far as is known: when its engine fails, it exits with code 0."""
        cause = last_exception(self.log, self._log_start)
        how = f"with code {code}" if code else "by itself"
        return f"vLLM ended {how}{when}" + ("" if cause is None else f" ({cause})")

    def _log_end(self) -> str:
        lines = last_lines(self.log)
        return f"The last lines of {self.log}:\n{lines}" if lines else f"{self.log} is empty"


async def _exit_code(process: asyncio.subprocess.Process, seconds: float) -> int | None:
    """The exit code of a process that ends within so many seconds; None of one that goes on."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(process.wait(), seconds)
    return process.returncode


def _arguments(options: VllmOptions, source: str, port: int) -> Sequence[str]:
    return (
        *("serve", source, "--host", "127.0.0.1", "--port", str(port), "--dtype", options.dtype),
        # Logprobs of the distribution that was sampled from, temperature included, as the learner takes them.
        *("--logprobs-mode", "processed_logprobs"),
        # The library that makes the masks of constraints for the learner, and reads the same grammars.
        *("--structured-outputs-config", '{"backend": "guidance"}'),
        "--disable-uvicorn-access-log",
        *("--enable-lora", "--max-loras", str(options.max_loras)),
        *("--max-lora-rank", str(options.max_lora_rank)),
        *options.arguments,
    )
