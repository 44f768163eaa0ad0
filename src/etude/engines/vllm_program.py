"""`vllm serve` as a program: its options, and its command on the machine that runs it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from etude.core.errors import EngineError
from etude.engines.programs import Command


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
    attempts: int = 5
    """Failed restarts in a row before it gives up."""
    backoff_seconds: float = 1.0
    """Seconds before the first restart; they double before each further one, up to a minute."""
    device: str = ""
    """Display name of its device, if there are several processes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables, such as the one that selects its device."""

    @property
    def log(self) -> Path:
        """The file with all its output, secrets masked. Each new vLLM appends to it."""
        return self.folder / "vllm.log"


@dataclass(frozen=True, slots=True)
class VllmProgram:
    """A vLLM that serves the model `source`."""

    options: VllmOptions
    source: str
    key: SecretStr

    def command(self, host: str) -> Command:
        """Return the command, with a port that is free now. Raises EngineError without program or model."""
        options, program = self.options, self.options.command[0]
        if shutil.which(program) is None:
            raise EngineError(
                f"'{program}' cannot be started: there is no such program; install vLLM, or name its program "
                "with --vllm-command"
            )
        if Path(self.source).is_absolute() and not Path(self.source).exists():
            raise EngineError(
                f"the node {host} has no folder {self.source}: put models, and the server's --data-dir, on "
                "storage that all nodes share, or serve a name on the Hugging Face hub"
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
        gate = str(Path(__file__).parent / "vllm_gate")
        paths = [gate, *filter(None, [os.environ.get("PYTHONPATH", "")])]
        # The key must not be on a command line; the other settings have no option.
        environment = {
            "VLLM_API_KEY": self.key.get_secret_value(),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            # Enables the paths that load weights in place; the gate guards them.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            **options.environment,
        }
        return Command(words, environment, address=f"http://{host}:{port}")
