"""`vllm serve` as a program to start: its options, and the command on the machine that runs it."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from etude.core.errors import EngineError
from etude.inference.programs import Command


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

    @property
    def log(self) -> Path:
        """Everything that it printed, with secrets masked; it goes on from one vLLM to the next."""
        return self.folder / "vllm.log"


@dataclass(frozen=True, slots=True)
class VllmProgram:
    """A vLLM that serves the model `source`."""

    options: VllmOptions
    source: str
    key: SecretStr

    def command(self, host: str) -> Command:
        """The command, with a port that is free now. Raises EngineError without the program or the model."""
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
            # Logprobs of the distribution that was sampled from, temperature included, as the learner takes
            # them.
            *("--logprobs-mode", "processed_logprobs"),
            # The library that makes the masks of constraints for the learner, and reads the same grammars.
            *("--structured-outputs-config", '{"backend": "guidance"}'),
            "--disable-uvicorn-access-log",
            *("--middleware", "etude_vllm_gate.Gate"),
            *("--enable-lora", "--max-loras", str(options.max_loras)),
            *("--max-lora-rank", str(options.max_lora_rank)),
            *options.arguments,
        )
        # It has the module by which vLLM asks for its key at all of its paths.
        gate = str(Path(__file__).parent / "vllm_gate")
        paths = [gate, *filter(None, [os.environ.get("PYTHONPATH", "")])]
        # What must not be on a command line, or has no option.
        environment = {
            "VLLM_API_KEY": self.key.get_secret_value(),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            # For the paths by which weights are loaded in place; the gate guards them.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            **options.environment,
        }
        return Command(words, environment, address=f"http://{host}:{port}")
