"""A `vllm serve` process: started, watched, restarted after a crash or hang, and stopped."""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import httpx
from pydantic import SecretStr

from etude.core.errors import EngineError, EtudeError
from etude.engines.programs import (
    Child,
    Command,
    Launcher,
    LocalLauncher,
    last_exception,
    last_lines,
    read_tail,
)
from etude.wire.retries import Refusal, Retryable, RetryPolicy, to_failure, with_retries

_LOG = logging.getLogger("etude.vllm")
_CONTROL = RetryPolicy(retries=2, deadline=60.0)
"""Retries of control requests, such as loading LoRA weights."""

_NOTICE_SECONDS = 3.0
"""Seconds within which a process that does not answer is found to have ended."""
_GRACE_SECONDS = 20.0
"""Seconds for vLLM to shut down after SIGTERM."""

State: TypeAlias = Literal["stopped", "starting", "running", "restarting", "failed"]

_UNLOADED = re.compile(r"\b(?!RotaryEmbedding:)(\w+): Failed to load weights|(weights) were not loaded from")
"""Matches vLLM's log where weights were not loaded, although the call succeeded. Rotary ones have none."""


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options for a vLLM process."""

    folder: Path
    """The folder of its log."""
    dtype: str
    """Always passed, because vLLM's own `auto` turns float32 weights into bfloat16."""
    command: tuple[str, ...] = ("vllm",)
    arguments: tuple[str, ...] = ()
    """Additional options of `vllm serve`."""
    max_lora_rank: int = 64
    max_loras: int = 2
    """Maximum number of LoRA weights in one batch."""
    start_seconds: float = 600.0
    """Seconds that a start may take; compiling a model for the first time takes minutes."""
    look_seconds: float = 2.0
    """Seconds between two health checks."""
    hung_seconds: float = 60.0
    """Seconds without a successful health check after which it counts as hung."""
    backoff_seconds: float = 1.0
    """Seconds before the first attempt to restart; they double before each further one, up to a minute."""
    device: str = ""
    """Display name of its device, if there are several processes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables, such as the one that selects its device."""

    @property
    def log(self) -> Path:
        """The file that all its output is appended to, secrets masked."""
        return self.folder / "vllm.log"


@dataclass(frozen=True, slots=True)
class VllmProgram:
    """A vLLM that serves the model `source`."""

    options: VllmOptions
    source: str
    key: SecretStr

    def command(self, host: str) -> Command:
        """Return the command, with a port that is free now. Raises EngineError without the program."""
        options, program = self.options, self.options.command[0]
        if shutil.which(program) is None:
            raise EngineError(
                f"'{program}' cannot be started: there is no such program; install vLLM, or name its program "
                "with --vllm-command"
            )
        with socket.socket() as listening:
            listening.bind((host, 0))
            port = int(listening.getsockname()[1])
        words = (
            *options.command,
            *("serve", self.source, "--host", host, "--port", str(port), "--dtype", options.dtype),
            # The learner needs logprobs of the distribution sampled from, temperature included.
            *("--logprobs-mode", "processed_logprobs"),
            # The same library masks constrained tokens for the learner, from the same grammars.
            *("--structured-outputs-config", '{"backend": "guidance"}'),
            "--disable-uvicorn-access-log",
            *("--middleware", "etude_vllm_gate.Gate"),
            *("--enable-lora", "--max-loras", str(options.max_loras)),
            *("--max-lora-rank", str(options.max_lora_rank)),
            *options.arguments,
        )
        # Has the module by which vLLM checks its key on all its paths.
        paths = [str(Path(__file__).parent / "vllm_gate"), os.environ.get("PYTHONPATH", "")]
        # The key must not be on a command line; the other settings have no option.
        environment = {
            "VLLM_API_KEY": self.key.get_secret_value(),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            # Enables the paths that load weights in place; the gate guards them.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **options.environment,
        }
        return Command(words, environment, address=f"http://{host}:{port}")


@dataclass(slots=True, eq=False)
class VllmProcess:
    """One vLLM process at a time, with a model and its LoRA weights, where its launcher places it.

    LoRA weights are loaded again after a restart.
    """

    options: VllmOptions
    launcher: Launcher = field(default_factory=LocalLauncher)
    source: str = ""
    state: State = "stopped"
    reason: str = ""
    """Why it is restarting or failed, with the log's last lines."""
    restarts: int = 0
    answered: int = 0
    """Answered requests."""
    failed: int = 0
    """Requests during which it went away."""
    key: SecretStr = field(default_factory=lambda: SecretStr(secrets.token_urlsafe(24)))
    _child: Child | None = None
    _started_with: str = ""
    _watching: asyncio.Task[None] | None = None
    _loras: dict[str, Path] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    """Notified of each change of state."""
    _client: httpx.AsyncClient | None = None

    @property
    def base_url(self) -> str:
        """Its URL, with another port after each start; empty while no process runs."""
        return "" if self._child is None else self._child.address

    @property
    def where(self) -> str:
        """The other machine that it runs on; empty on this one, and while no process runs."""
        return "" if self._child is None or not self.launcher.address else self._child.node

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that its requests need."""
        return {"authorization": f"Bearer {self.key.get_secret_value()}"}

    @property
    def pid(self) -> int | None:
        """The process id, or None while no process runs."""
        return None if self._child is None else self._child.pid

    async def start(self, source: str) -> None:
        """Serve `source`; return once requests are answered. Raises EngineError if it does not start."""
        await self.stop()
        self.source = source
        await self._set("starting")
        try:
            await self._spawn()
        except EngineError as error:
            await self._set("failed", str(error))
            raise
        except BaseException:
            await self._set("stopped")
            raise
        await self._set("running")
        self._watching = asyncio.create_task(self._watch(), name="watch vllm")

    def served_name(self, name: str) -> str:
        """Return vLLM's name for a model; the base model has the name that it was started with."""
        return self._started_with if name == self.source else name

    async def change_to(self, source: str) -> None:
        """Serve the full weights of `source`, which have the same shapes. No request may be running.

        The running process loads them if it can. Otherwise it is started again. Raises EngineError.
        """
        if self.state != "running" or self._child is None:
            await self.start(source)
            return
        try:
            await self._load_in_place(self._child, source)
        except EngineError as error:
            _LOG.warning("%s; it is started again with the new weights", error)
            await self.start(source)
        self.source = source

    async def _load_in_place(self, child: Child, source: str) -> None:
        """Load full weights into the running process. After an EngineError its weights are unknown."""
        self._loras.clear()
        await child.catch_up()
        before = child.log.stat().st_size
        # vLLM reads the files into the memory of the old weights, which takes no longer than a start.
        rpc = {"method": "reload_weights", "kwargs": {"weights_path": source}}
        await self._post("/collective_rpc", rpc, seconds=self.options.start_seconds)
        await self._post("/reset_prefix_cache", {})
        await child.catch_up()
        printed = await asyncio.to_thread(read_tail, child.log, 2**18, before)
        if left := sorted({kind or rest for kind, rest in _UNLOADED.findall(printed)}):
            raise EngineError(f"vLLM did not load {', '.join(left)} of {source}")

    async def stop(self) -> None:
        """End the process and forget its LoRA weights."""
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

    async def add_lora(self, name: str, folder: Path) -> bool:
        """Load LoRA weights (the absolute path of a peft folder) under a name never used before.

        Return whether they are loaded now: a process that is not running loads them at its next start.
        Raises EngineError if vLLM refuses them.
        """
        self._loras[name] = folder
        child = self._child
        if self.state != "running" or child is None:
            return False
        try:
            await self._load(child, name, folder)
        except EngineError:
            # That it has just gone may not have been noticed yet.
            if await _describe_end(child, _NOTICE_SECONDS) is None:
                raise
            return False
        return True

    async def _load(self, child: Child, name: str, folder: Path) -> None:
        path = await child.send_folder(folder)
        # Not `load_inplace`: it reads the folder again at every step, and changes answers in the middle.
        await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def remove_lora(self, name: str) -> None:
        """Unload LoRA weights; ignore those that are not loaded."""
        if self._loras.pop(name, None) is not None and self.state == "running" and self._child is not None:
            with contextlib.suppress(EngineError):
                await self._post("/v1/unload_lora_adapter", {"lora_name": name})
            await self._child.drop_folder(name)

    async def _post(self, path: str, body: Mapping[str, Any], seconds: float = 120.0) -> None:
        async def post() -> None:
            reply = await self._http().post(
                f"{self.base_url}{path}", json=dict(body), headers=self.headers, timeout=seconds
            )
            if reply.status_code != httpx.codes.OK:
                raise to_failure(reply.status_code, reply.headers, reply.content)

        try:
            # Retry only refusals: the watcher knows more about other failures.
            await with_retries(post, policy=_CONTROL)
        except httpx.HTTPError as error:
            raise EngineError(f"vLLM does not answer at {path}: {type(error).__name__}") from error
        except (Retryable, Refusal) as error:
            raise EngineError(f"vLLM refused {path}: {error}") from error

    async def _spawn(self) -> None:
        """Start the process and load all weights. Raises EngineError, and then no process is left."""
        try:
            end, seconds = time.monotonic() + self.options.start_seconds, self.options.start_seconds
            self._started_with = self.source
            program = VllmProgram(self.options, self.source, self.key)
            child = self._child = await self.launcher.launch(program, self.options.log)
            while not await self._is_healthy():
                if (how := await _describe_end(child, 0.25)) is not None:
                    raise EngineError(f"at its start vLLM {how}. {self._log_end()}")
                if time.monotonic() > end:
                    await child.catch_up()
                    raise EngineError(f"vLLM did not start in {seconds:g} s. {self._log_end()}")
            loaded = set[str]()
            while missing := self._loras.keys() - loaded:  # More may be added during a load.
                name = missing.pop()
                await self._load(child, name, self._loras[name])
                loaded.add(name)
        except BaseException as error:
            # It has no requests to finish, and would take minutes to react to SIGTERM.
            await self._end(0.0)
            if isinstance(error, EtudeError) and not isinstance(error, EngineError):
                raise EngineError(str(error)) from error
            raise

    async def _is_healthy(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            seconds = min(10.0, self.options.hung_seconds)
            reply = await self._http().get(f"{self.base_url}/health", timeout=seconds)
            return bool(reply.status_code == httpx.codes.OK)
        return False

    def _http(self) -> httpx.AsyncClient:
        """Return the shared client: making one blocks the event loop for tens of milliseconds."""
        if self._client is None:
            self._client = httpx.AsyncClient()
        return self._client

    async def _watch(self) -> None:
        """Restart the process whenever something goes wrong, in as many attempts as that takes."""
        while True:
            trouble = await self._trouble()
            self.restarts += 1
            await self._set("restarting", trouble)
            _LOG.error("%s", self.reason)
            await self._end(0.0)
            pause = self.options.backoff_seconds
            while self.state != "running":
                await asyncio.sleep(pause)
                pause = min(60.0, 2 * pause)
                try:
                    await self._spawn()
                except EngineError as error:
                    await self._set("restarting", str(error))
                    _LOG.error("%s", error)
                else:
                    await self._set("running")
                    _LOG.warning("vLLM runs again, after %d restart(s)", self.restarts)

    async def _trouble(self) -> str:
        """Wait until something goes wrong, and return a description."""
        child, seen = self._child, time.monotonic()
        assert child is not None
        while (how := await _describe_end(child, self.options.look_seconds)) is None:
            if await self._is_healthy():
                seen = time.monotonic()
            elif time.monotonic() - seen > self.options.hung_seconds:
                how = f"did not answer for {self.options.hung_seconds:g} s"
                await child.catch_up()
                break
        return f"vLLM {how}. {self._log_end()}"

    def _log_end(self) -> str:
        log, on = self.options.log, f", from {self.where}" if self.where else ""
        lines = last_lines(log)
        return f"The last lines of {log}{on}:\n{lines}" if lines else f"{log} is empty"

    async def _end(self, seconds: float = _GRACE_SECONDS) -> None:
        """End the process; it has this many seconds to shut down."""
        child, self._child = self._child, None
        if child is not None:
            await child.end(seconds)

    async def _set(self, state: State, reason: str = "") -> None:
        self.state, self.reason = state, reason
        async with self.changed:
            self.changed.notify_all()


async def _describe_end(child: Child, seconds: float) -> str | None:
    """Return how a process ended, such as `ended with code 1 (cause)`; None if it still runs after `seconds`.

    vLLM exits with code 0 if its engine fails, and only its log has the cause.
    """
    try:
        async with asyncio.timeout(seconds):
            end = await child.wait()
    except TimeoutError:
        return None
    if end.code is None:
        return end.how
    cause = last_exception(child.log, child.begin)
    how = f"ended with code {end.code}" if end.code else "ended without an error"
    return how + ("" if cause is None else f" ({cause})")
