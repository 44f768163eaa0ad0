"""The doctor: the state of the installation, the machine and a config's services, to look at first."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from etude.backends.capabilities import LocalAdapterConfig
from etude.config.builder import Builder
from etude.config.schema import Config
from etude.core.call import ChatRequest, Sampling
from etude.core.errors import EtudeError, install_command
from etude.engines.openai_compatible import OpenAiEngine, OpenAiLlmConfig
from etude.models.device import available_memory, choose_device, shown_bytes, usable_cores
from etude.preflight.finding import Findings
from etude.store.backup import probe
from etude.store.run_folder import RunFolder

_PACKAGE = Path(__file__).parents[1]

EXTRAS = {
    "local": ("torch", "models that run and train in this process"),
    "data": ("pyarrow", "Parquet and Hugging Face datasets"),
    "plots": ("matplotlib", "pictures of a run's rewards"),
}
"""A package of each extra, and its use."""


def examine(folder: Path) -> Findings:
    """Examine Python, extras, device, memory and the disk of `folder`."""
    findings = Findings()
    findings.ok("etude", f"{importlib.metadata.version('etude')} in {_PACKAGE}")
    findings.ok("python", f"{platform.python_version()} at {sys.executable}, {platform.platform()}")
    for extra, (package, use) in EXTRAS.items():
        if find_spec(package) is None:
            findings.warn(f"extra '{extra}'", f"not installed; for {use}: {install_command(extra)}")
        else:
            findings.ok(f"extra '{extra}'", f"installed: {use}")
    _torch(findings)
    _memory_and_disk(folder, findings)
    return findings


def _torch(findings: Findings) -> None:
    if find_spec("torch") is None:
        return
    try:
        import torch
    except (ImportError, OSError) as error:
        findings.fail("torch", f"is installed and cannot be imported: {error}; install it again")
        return
    device = choose_device()
    name = f" ({torch.cuda.get_device_name()})" if device.type == "cuda" else ""
    findings.ok("torch", f"{torch.__version__}, device {device.type}{name}, {usable_cores()} cores")


def _memory_and_disk(folder: Path, findings: Findings) -> None:
    free = available_memory()
    if free is not None and free < 1e9:  # Loading torch and a tiny model takes some 0.5 GB.
        findings.warn(
            "memory", f"only {shown_bytes(free)} free; end other programs, or take a larger machine"
        )
    elif free is not None:
        findings.ok("memory", f"{shown_bytes(free)} free")
    existing = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    room = shutil.disk_usage(existing).free
    if room < 2e9:
        advice = "free some, or name another folder with --output-dir"
        findings.warn("disk", f"only {shown_bytes(room)} free in {folder.absolute()}; {advice}")
    else:
        findings.ok("disk", f"{shown_bytes(room)} free in {folder.absolute()}")


async def examine_services(config: Config, findings: Findings) -> None:
    """Ask each model behind an address for an answer, and check backends and the storage.

    Each gets a minimal request, with its key.
    """
    for name, llm in config.llms.items():
        if isinstance(llm, OpenAiLlmConfig):
            await _try_model(f"model {name}", llm, findings)
    with (
        tempfile.TemporaryDirectory(prefix="etude-doctor-") as folder,
        RunFolder.create(Path(folder), "doctor") as run,
    ):
        async with Builder(config, run) as builder:
            for name, settings in config.trainer_adapters.items() if config.finetuning.enabled else ():
                if isinstance(settings, LocalAdapterConfig):
                    continue
                with findings.catch_errors(f"backend {name}"):
                    adapter = await builder.get_trainer_adapter(name)
                    if await adapter.is_healthy():
                        findings.ok(f"backend {name}", "answers, and can train now")
                    else:
                        why = adapter.unhealthy_because or "look at its address and `api_key`"
                        findings.fail(f"backend {name}", f"does not answer, or refuses its key: {why}")
    if config.storage is not None:
        with findings.catch_errors("storage"):
            findings.ok("storage", await probe(config.storage))


async def _try_model(what: str, llm: OpenAiLlmConfig, findings: Findings) -> None:
    """Ask for one short answer, without retries."""
    seconds = min(30.0, llm.request_timeout)
    engine = OpenAiEngine(llm.model_copy(update={"max_retries": 0, "request_timeout": seconds}))
    # Some endpoints refuse fewer tokens.
    request = ChatRequest(({"role": "user", "content": "Say yes."},), sampling=Sampling(max_tokens=16))
    begun = time.perf_counter()
    try:
        completion = await engine.complete(request)
    except EtudeError as error:
        findings.fail(what, f"{error}. Look at its `base_url`, `model_name` and `api_key`")
    else:
        took, usage = 1000 * (time.perf_counter() - begun), completion.usage
        tokens = f"{usage.prompt_tokens} + {usage.completion_tokens} tokens"
        findings.ok(what, f"{llm.model_name} answered a call in {took:.0f} ms ({tokens})")
    finally:
        await engine.close()
