"""The check of a config's services: each gets a minimal request, with its key."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from etude.backends.capabilities import LocalAdapterConfig
from etude.backup.address import probe
from etude.config.builder import Builder
from etude.config.schema import Config
from etude.core.call import ChatRequest, Sampling
from etude.core.errors import EtudeError
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from etude.preflight.finding import Findings
from etude.store.run_folder import RunFolder


async def examine_services(config: Config, findings: Findings) -> None:
    """Ask each model behind an address for an answer, and check backends and the storage."""
    for name, llm in config.llms.items():
        if isinstance(llm, OpenAiLlmConfig):
            await _ask_addresses(f"model {name}", llm, findings)
            await _try_model(f"model {name}", llm, findings)
    with (
        tempfile.TemporaryDirectory(prefix="etude-doctor-") as folder,
        RunFolder.create(Path(folder), "doctor") as run,
    ):
        async with Builder(config, run) as builder:
            for name in config.trainer_adapters if config.finetuning.enabled else ():
                if not isinstance(config.trainer_adapters[name], LocalAdapterConfig):
                    await _try_backend(builder, name, findings)
    if config.storage is not None:
        with findings.catch_errors("storage"):
            findings.ok("storage", await probe(config.storage))


async def _ask_addresses(what: str, llm: OpenAiLlmConfig, findings: Findings) -> None:
    """Ask each address of a model for the list of its models. Nothing is sampled."""
    from etude.inference.http_addresses import HttpAddresses

    with findings.catch_errors(what):
        addresses = HttpAddresses(llm)
        addresses.wanted = llm.model_name
        every = addresses.routes.addresses
        try:
            reasons = await asyncio.gather(*map(addresses.probe_address, every))
        finally:
            await addresses.close()
        for address, reason in zip(every, reasons, strict=True):
            if reason is None:
                findings.ok(f"{what} at {address.url}", "answers")
            else:
                findings.fail(f"{what} at {address.url}", reason)


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


async def _try_backend(builder: Builder, name: str, findings: Findings) -> None:
    what = f"backend {name}"
    with findings.catch_errors(what):
        adapter = await builder.get_trainer_adapter(name)
        if await adapter.is_healthy():
            findings.ok(what, "answers, and can train now")
        else:
            why = f" ({adapter.unhealthy_because})" if adapter.unhealthy_because else ""
            findings.fail(
                what, f"does not answer, or refuses its key; look at its address and `api_key`{why}"
            )
