"""The HTTP addresses of one model: sending to them, each with its key, and probing them."""

from __future__ import annotations

import asyncio
import os

from pydantic import SecretStr
from pydantic_core import from_json

from etude.core.errors import RequestError
from etude.inference.http_lanes import HttpLanes
from etude.inference.openai_config import OPENAI_URL, OpenAiLlmConfig, require_a_key_each
from etude.inference.route_watch import RouteWatch
from etude.inference.routes import Address, Routes
from etude.wire.client import Disturbed, Refused, failure_of

_PROBE_SECONDS = 5.0


class HttpAddresses:
    """Where an endpoint's model is served: one address, or several that share its calls."""

    def __init__(self, config: OpenAiLlmConfig) -> None:
        """Raises RequestError where a key is missing, or there are more or fewer than addresses."""
        self._config = config
        self.routes = Routes(config.addresses)
        self._secrets = [value.get_secret_value() for value in config.headers.values()]
        if isinstance(config.api_key, list):
            try:
                require_a_key_each(len(config.api_key), config.addresses)
            except ValueError as error:
                raise RequestError(f"model '{config.model_name}': {error}") from error
        self._lanes = {
            url: HttpLanes(self._headers(url, key))
            for url, key in zip(config.addresses, config.keys, strict=True)
        }
        self.wanted: str | None = None
        """The model that an address must list before it is used again; None where any will do."""
        self._watch = RouteWatch(config.model_name, self.routes, self.lacking)

    @property
    def are_several(self) -> bool:
        """Whether there is more than one."""
        return len(self.routes.addresses) > 1

    async def post(self, address: Address, path: str, content: bytes) -> bytes:
        """The body of a good answer. Raises Disturbed or Refused."""
        import httpx

        seconds = self._config.request_timeout
        try:
            # httpx limits each read; an endpoint that trickles bytes could hold the call for ever.
            async with asyncio.timeout(seconds):
                response = await self._lanes[address.url].post(f"{address.url}/{path}", content)
        except TimeoutError:
            late = f"no answer within {seconds:g} s; `request_timeout` sets the limit"
            raise Disturbed(late, is_gone=True) from None
        except httpx.LocalProtocolError as error:
            raise Refused(f"the request cannot be sent: {error}") from error
        except httpx.RequestError as error:
            raise Disturbed(f"{type(error).__name__}: {error}".rstrip(": "), is_gone=True) from error
        if response.status_code != 200:
            raise failure_of(response.status_code, response.headers, response.content)
        return response.content

    def failed(self, address: Address, since: float, error: Disturbed) -> None:
        """Note an attempt, begun at `since`, without a good answer."""
        if error.retry_after is not None:
            address.failed += 1
            self.routes.drain(address, error.retry_after, self.masked(str(error)))
        else:
            self._watch.failed(address, since, self.masked(str(error)), is_gone=error.is_gone)

    def refused(self, address: Address, reason: str) -> None:
        """Note an address that answers no calls at all: a wrong key, no such model, no money."""
        address.failed += 1
        self.set_aside(address, reason)

    def set_aside(self, address: Address, reason: str) -> None:
        """Use an address no more until a probe finds nothing wrong."""
        self._watch.set_aside(address, self.masked(reason))

    async def lacking(self, address: Address) -> str | None:
        """Why an address cannot be used, as far as the list of its models tells; None where it can be."""
        import httpx

        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                response = await self._lanes[address.url].get(f"{address.url}/models")
        except TimeoutError:
            return f"no answer to a probe within {_PROBE_SECONDS:g} s"
        except httpx.RequestError as error:
            return f"{type(error).__name__}: {error}".rstrip(": ")
        if response.status_code >= 500:
            return f"HTTP {response.status_code} to a probe"
        names = _names(response.content) if response.status_code == 200 else None
        address.lacks_model = self.wanted is not None and names is not None and self.wanted not in names
        return f"it does not have the model '{self.wanted}'" if address.lacks_model else None

    def states(self) -> dict[str, str]:
        """How each address is, with the reason where it is not up."""
        return {
            address.url: f"{address.state}: {address.reason}" if address.reason else address.state
            for address in self.routes.addresses
        }

    def masked(self, text: str) -> str:
        """The text without keys and other secrets."""
        for secret in filter(None, self._secrets):
            text = text.replace(secret, "***")
        return text

    async def close(self) -> None:
        """Close all connections. Calling it twice is fine."""
        await self._watch.close()
        for lanes in self._lanes.values():
            await lanes.close()

    def _headers(self, url: str, configured: SecretStr | None) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        key = configured.get_secret_value() if configured else os.environ.get("OPENAI_API_KEY", "")
        key = key.strip()
        if key:
            self._secrets.append(key)
            headers["authorization"] = f"Bearer {key}"
        elif url == OPENAI_URL:
            raise RequestError(
                f"model '{self._config.model_name}' is to be sampled from OpenAI, but there is no API key. "
                "Set OPENAI_API_KEY, or `api_key`, or `base_url` for another endpoint."
            )
        return headers | {name: value.get_secret_value() for name, value in self._config.headers.items()}


def _names(data: bytes) -> set[str] | None:
    """The models of a list as OpenAI writes it; None for anything else."""
    try:
        return {str(model["id"]) for model in from_json(data)["data"]}
    except (ValueError, KeyError, TypeError):
        return None
