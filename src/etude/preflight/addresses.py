"""Asking the addresses of a model how they are; nothing is sampled."""

from __future__ import annotations

import asyncio

from etude.inference.http_addresses import HttpAddresses, Listing
from etude.inference.openai_config import OpenAiLlmConfig
from etude.preflight.finding import Findings

_SHOWN = 5


async def check_addresses(
    what: str, llm: OpenAiLlmConfig, findings: Findings, *, strict: bool = False
) -> None:
    """Ask each address of a model for the list of its models; `strict`: each of them has to answer."""
    with findings.of_errors(what):
        addresses = HttpAddresses(llm)
        every = addresses.routes.addresses
        try:
            listings = await asyncio.gather(*map(addresses.listing, every))
        finally:
            await addresses.close()
        rest = "; a run would use the others" if len(every) > 1 else ""
        for address, listing in zip(every, listings, strict=True):
            if trouble := _trouble(listing, llm.model_name):
                note = findings.fail if strict else findings.warn
                note(f"{what} at {address.url}", trouble + rest)
            else:
                findings.ok(f"{what} at {address.url}", f"answers in {1000 * listing.seconds:.0f} ms")


def _trouble(listing: Listing, model: str) -> str:
    if listing.error:
        return listing.error
    if listing.status in (401, 403):
        return f"HTTP {listing.status} to a probe: look at `api_key`, unless it may only sample"
    if listing.status >= 500:
        return f"HTTP {listing.status} to a probe"
    if listing.names is not None and model not in listing.names:
        shown = ", ".join(sorted(listing.names)[:_SHOWN]) or "none"
        return f"it does not have the model '{model}'; its models: {shown}"
    return ""
