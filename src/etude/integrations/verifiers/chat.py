"""A chat loop of verifiers' that runs in this process: no interpreter is started for an episode."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

from etude.core.json_text import JsonError, read_json
from etude.integrations.verifiers import CHAT

__all__ = ["ChatHarness"]

_OVERFLOW = "context_length_exceeded"

Json = dict[str, Any]


def install() -> None:
    """Let verifiers find the harness by its id, as a module of its own package. Doing it twice is fine."""
    sys.modules[f"verifiers.v1.harnesses.{CHAT.replace('-', '_')}"] = sys.modules[__name__]


class ChatHarnessConfig(vf.HarnessConfig):
    """As that of verifiers' `null` harness."""

    id: str = CHAT


class ChatHarness(vf.Harness[ChatHarnessConfig]):
    """Asks the model until it answers without a tool call, and calls the tools of MCP servers in between.

    It does what verifiers' `null` harness does, which starts a Python process for each segment.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    SUPPORTS_TOOL_INTERCEPTION = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Mapping[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        """Run one segment. Raises HarnessError's causes: what a call, or a server of tools, failed with."""
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or ()]
        async with AsyncExitStack() as stack:
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
            }
            tools = _Tools(*await connect_mcp({"mcpServers": servers}, stack))
            timeout = aiohttp.ClientTimeout(total=None)
            headers = {"Authorization": f"Bearer {secret}"}
            web = await stack.enter_async_context(aiohttp.ClientSession(headers=headers, timeout=timeout))
            await _Loop(web, endpoint, tool_interception_url, tools, trace).run(ctx.model, messages)
        return vf.ProgramResult(0, "", "")


class _Tools:
    """The tools of the servers that a segment is connected to."""

    def __init__(self, schemas: list[Json], dispatch: Mapping[str, Any], servers: Mapping[str, Any]) -> None:
        self.schemas = schemas
        self._dispatch = dispatch
        self._servers = servers

    async def call(self, name: str, written: str) -> Any:
        """The result of a call, or the words that tell the model why there is none."""
        if name not in self._dispatch:
            return f"error: unknown tool {name!r}"
        try:
            arguments = read_json(written or "{}", unique_keys=False)
        except JsonError as error:
            return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        if not isinstance(arguments, dict):
            return "error: tool arguments must be a JSON object; resend the call with one"
        return await call_mcp(self._servers, self._dispatch, name, arguments)


class _Loop:
    """The conversation of one segment."""

    def __init__(
        self, web: aiohttp.ClientSession, endpoint: str, gate: str | None, tools: _Tools, trace: Any
    ) -> None:
        self._web = web
        self._url = f"{endpoint}/chat/completions"
        self._gate = gate
        self._tools = tools
        self._trace = trace

    async def run(self, model: str, messages: list[Json]) -> None:
        while True:
            body: Json = {"model": model, "messages": messages}
            if self._tools.schemas:
                body["tools"] = self._tools.schemas
            answer = await self._ask(body)
            if answer is None:
                return
            messages.append(answer)
            if not (calls := answer.get("tool_calls")):
                return
            if not await self._answer_calls(calls, messages):
                return

    async def _ask(self, body: Json) -> Json | None:
        """The model's message; None where a limit or a condition of the task ends the segment."""
        async with self._web.post(self._url, json=body) as response:
            if response.status == 200:
                return _without_nulls((await response.json())["choices"][0]["message"])
            text = await response.text()
        ended = self._trace.stop_condition is not None
        # A conversation that outgrew the context is over; a first prompt that never fitted is a failure.
        if ended or (_OVERFLOW in text and self._trace.num_turns):
            return None
        raise RuntimeError(f"the model's answer has status {response.status}: {text[:500]}")

    async def _answer_calls(self, calls: Sequence[Json], messages: list[Json]) -> bool:
        """Append the tools' results; False where the task's own rule ends the segment."""
        for call in calls:
            function = call["function"]
            verdict: Json = await self._verdict(call) if self._gate else {"action": "allow"}
            if verdict["action"] == "stop":
                return False
            if verdict["action"] == "deny":
                messages.append(verdict["message"])
                continue
            content = await self._tools.call(function["name"], function.get("arguments") or "")
            messages.append(
                {"role": "tool", "tool_call_id": call["id"], "name": function["name"], "content": content}
            )
        return True

    async def _verdict(self, call: Json) -> Json:
        """Whether the task lets a tool be called: verifiers asks its hooks before each call."""
        function = call["function"]
        try:
            arguments = read_json(function.get("arguments") or "{}", unique_keys=False)
        except JsonError:
            arguments = function.get("arguments")
        asked = {"tool_call_id": call["id"], "name": function["name"], "arguments": arguments}
        async with self._web.post(str(self._gate), json=asked) as response:
            response.raise_for_status()
            verdict: Json = await response.json()
            return verdict


def _without_nulls(message: Json) -> Json:
    return {key: value for key, value in message.items() if value is not None}
