"""The backends that load models: into this process, or into a vLLM that the server runs."""

import asyncio
import contextlib
import shlex
import shutil
from abc import ABC, abstractmethod
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from accelerate.utils import release_memory

from etude.engines.answer import TokenEngine
from etude.engines.embedded import EmbeddedEngine
from etude.engines.vllm_engine import VllmEngine, VllmProcesses
from etude.engines.vllm_process import VllmOptions, VllmProcess
from etude.models.architecture import original_length, text_config
from etude.models.device import choose_device, dtype_name
from etude.models.policy import Policy, policy_dtype
from etude.models.text_codec import TextCodec
from etude.models.weights import load_outline, load_tensors, loading, write_lora_folder
from etude.server.models import ServedModel, load_policy
from etude.server.settings import ServerSettings
from etude.store.files import WEIGHTS_FILE, damage_in, note_sums, open_draft

_GPUS, _CPU_CORES = "CUDA_VISIBLE_DEVICES", "VLLM_CPU_OMP_THREADS_BIND"
"""The environment variables that tell vLLM which GPUs or CPU cores to use."""
_MAX_TOKENS = 512
"""The token limit of a chat completion that sets none."""
_SAMPLER_CPUS = 1.0
"""The CPUs that Ray reserves for each vLLM on a cluster."""


class Backend(ABC):
    """A loader of models for the engine pool, which decides when to load."""

    name: str
    codec: TextCodec
    """The models' tokenizer and template, set by `open`."""

    @abstractmethod
    async def open(self) -> None:
        """Load the base model, so that a bad one fails the command. Raises EtudeError."""

    def memory_group(self, model: ServedModel) -> str:
        """Return the model's group. Only models of one group fit in memory together; by default all do."""
        return ""

    @abstractmethod
    async def load(self, model: ServedModel) -> TokenEngine:
        """Return an engine for a model. Raises EngineError if it cannot be loaded."""

    @abstractmethod
    async def unload(self, model: ServedModel, engine: TokenEngine) -> None:
        """Free an engine's resources."""

    async def free_device(self) -> None:  # noqa: B027  most have nothing left once all is unloaded
        """Free the device after all models are unloaded."""

    async def close(self) -> None:
        """Free everything. The backend is not used again."""
        await self.free_device()

    def status(self) -> dict[str, Any]:
        """Return the fields that the backend adds to `GET /engine/status`."""
        return {}


class EmbeddedBackend(Backend):
    """Models in this process, one engine each."""

    name = "embedded"

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._first: Policy | None = None

    async def open(self) -> None:
        settings = self._settings
        self._first = await asyncio.to_thread(
            Policy.load, settings.model, device=settings.device, dtype=settings.dtype
        )
        self.codec = self._first.codec

    async def load(self, model: ServedModel) -> TokenEngine:
        """Load the base model and put the trained tensors of `model` on it."""
        settings, policy = self._settings, self._first
        self._first = None
        if policy is None or model.folder is not None:
            policy = await asyncio.to_thread(load_policy, settings, model)
        return EmbeddedEngine(policy, max_tokens=_MAX_TOKENS)

    async def unload(self, model: ServedModel, engine: TokenEngine) -> None:
        await engine.close()
        await asyncio.to_thread(release_memory)


class VllmBackend(Backend):
    """Models in vLLM. LoRA weights load at run time, each under its own name. Full weights need a restart."""

    name = "vllm"

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._folder = (settings.data_dir / "vllm").absolute()
        device = choose_device(settings.device)
        options = VllmOptions(
            folder=self._folder,
            dtype=dtype_name(policy_dtype(settings.model, settings.dtype, device)),
            command=tuple(shlex.split(settings.vllm_command)),
            arguments=(*context_arguments(settings.model), *settings.vllm_arg),
            max_loras=max(1, settings.max_models - 1),
        )
        self._device = device.type
        names = _CPU_CORES if device.type == "cpu" else _GPUS
        on_devices = [
            replace(options, folder=self._folder / str(number), device=own, environment={names: own})
            for number, own in enumerate(settings.vllm_device)
        ]
        placed = [replace(options, folder=self._folder / str(number)) for number in range(settings.samplers)]
        self._processes = VllmProcesses([VllmProcess(own) for own in on_devices or placed or [options]])
        self._numbers = count(1)
        self._exits = contextlib.ExitStack()
        self._loads_in_place = False
        self._names: dict[str, str] = {}
        """vLLM's names for LoRA weights, by model."""

    async def open(self) -> None:
        """Start vLLM with the base model. Raises RequestError if its files do not match its config."""
        self.codec = await asyncio.to_thread(TextCodec.load, self._settings.model)
        # vLLM 0.32 loads an output layer that is tied to the embeddings only at start.
        self._loads_in_place = not await asyncio.to_thread(_ties_embeddings, self._settings.model)
        if self._settings.samplers:
            await asyncio.to_thread(self._connect)
        await self._processes.start(self._settings.model)

    def _connect(self) -> None:
        """Connect to the cluster and place the processes there. Do not call this in the main thread: Ray
        would handle SIGTERM there."""
        from etude.processes.ray_cluster import connect_ray, gpus_each
        from etude.processes.ray_nodes import RayLauncher

        settings, cluster = self._settings, self._settings.cluster
        assert cluster is not None
        code = Path.cwd() if settings.algorithms else None  # For jobs, which use the same connection.
        self._exits.enter_context(connect_ray(cluster.address, code))
        import ray  # Without Ray, `connect_ray` has raised an error that says so.

        on_gpus = self._device != "cpu"
        gpus = gpus_each(settings.sampler_gpus, ray.cluster_resources(), on_gpus=on_gpus)
        for process in self._processes.processes:
            seconds = process.options.start_seconds
            process.launcher = RayLauncher(_SAMPLER_CPUS, gpus, seconds=seconds)

    def memory_group(self, model: ServedModel) -> str:
        """LoRA weights share the base model's group. A model with full weights has its own."""
        return "" if model.folder is None or model.lora is not None else model.name

    async def load(self, model: ServedModel) -> TokenEngine:
        """Make vLLM serve the model. Raises EngineError with the last lines of its log if it does not."""
        settings, base = self._settings, self._settings.model
        is_whole = model.folder is not None and model.lora is None
        name = str(await asyncio.to_thread(self._write_whole, model)) if is_whole else base
        await self._processes.start(name, in_place=self._loads_in_place)
        if model.folder is not None and model.lora is not None:
            # A name is never used twice, so that a running answer keeps the weights it began with.
            name = f"lora-{next(self._numbers)}"
            folder = self._folder / name
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            tensors = await asyncio.to_thread(load_tensors, model.folder / WEIGHTS_FILE)
            await asyncio.to_thread(write_lora_folder, tensors, model.lora, base=base, folder=folder)
            await self._processes.add_lora(name, folder)
            self._names[model.name] = name
        return VllmEngine(
            self._processes,
            name,
            self.codec,
            max_tokens=_MAX_TOKENS,
            wait=settings.engine_wait,
            version=0 if model.folder is None else 1,
        )

    async def unload(self, model: ServedModel, engine: TokenEngine) -> None:
        """Unload LoRA weights. A model with full weights stays until the next one starts."""
        await engine.close()
        name = self._names.pop(model.name, None)
        if name is not None:
            await self._processes.remove_lora(name)
            await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    async def free_device(self) -> None:
        await self._processes.stop()

    async def close(self) -> None:
        await self.free_device()
        await asyncio.to_thread(self._exits.close)

    def status(self) -> dict[str, Any]:
        return self._processes.status()

    def _write_whole(self, model: ServedModel) -> Path:
        """Return a folder with all weights of a model. An earlier server may have written it."""
        folder = self._folder / f"model-{model.digest}"
        if damage_in(folder):
            dtype: Any = self._processes.processes[0].options.dtype
            policy = load_policy(replace(self._settings, device="cpu", dtype=dtype), model)
            with open_draft(folder) as draft:
                policy.export(draft)
                note_sums(draft)
        return folder


def context_arguments(source: str) -> tuple[str, ...]:
    """Return vLLM's options for a model with LongRoPE, so that it rotates tokens as the learner does."""
    with loading(source) as (_, _, config):
        length = original_length(config.get_text_config())
    return () if length is None else ("--max-model-len", str(length))


def _ties_embeddings(source: str) -> bool:
    with loading(source) as (location, file, config):
        model = load_outline(config, location, **file)
    return bool(text_config(model).tie_word_embeddings)
