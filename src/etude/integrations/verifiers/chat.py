"""verifiers' chat program, run in this process without an interpreter for each episode.

verifiers' `null` harness makes `uv` install the program's packages and runs it as a script, for each segment
of an episode. That takes 9 s for a turn, this module some milliseconds.
"""

from __future__ import annotations

import json
import ssl
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Mapping
from functools import partial
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harnesses.null import NullHarness, NullHarnessConfig
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE

from etude.integrations.verifiers import CHAT

__all__ = ["ChatHarness"]

_NO_CERTIFICATES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_PROGRAM = compile(CHAT_PROGRAM_SOURCE, "verifiers' chat program", "exec")


def install() -> None:
    """Make verifiers find the harness by its id, as a module of its package. Calling it twice is fine."""
    sys.modules[f"verifiers.v1.harnesses.{CHAT.replace('-', '_')}"] = sys.modules[__name__]


class ChatHarnessConfig(NullHarnessConfig):
    """The config of verifiers' `null` harness, with Etude's id."""

    id: str = CHAT


class ChatHarness(NullHarness):
    """verifiers' `null` harness without a separate process."""

    async def setup(self, runtime: Any) -> None:
        """Do nothing: there is nothing to install."""

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
        """Run one segment, and return the program's result."""
        system, prompt = self.resolve_prompt(data)
        messages_file = ""
        if prompt and not isinstance(prompt, str):
            # The program deletes the file.
            with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
                json.dump([message_to_wire(message) for message in prompt], file)
            messages_file = file.name
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        arguments = Namespace(
            # The `null` harness does not pass these.
            bash=False,
            edit=False,
            search=False,
            serper_key="",
            compaction=False,
            summarize_at_tokens=None,
            base_url=endpoint,
            api_key=secret,
            model=ctx.model,
            system_prompt=system or "",
            prompt=prompt if isinstance(prompt, str) else "",
            initial_messages_file=messages_file,
            mcp_config=json.dumps({"mcpServers": servers}) if servers else "",
            tool_interception_url=tool_interception_url or "",
        )
        program: dict[str, Any] = {"__name__": "etude_chat_program"}
        exec(_PROGRAM, program)  # Each segment gets its own namespace, in under a millisecond.
        program["parse_args"] = lambda: arguments
        # The program only talks to this process, where Etude retries calls itself. Reading the certificates
        # would take longer than everything else, so none is trusted.
        program["AsyncOpenAI"] = partial(program["AsyncOpenAI"], max_retries=0)
        client = program["DefaultAsyncHttpxClient"]
        program["DefaultAsyncHttpxClient"] = lambda verify: client(verify=_NO_CERTIFICATES)
        try:
            await program["main"]()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
            return vf.ProgramResult(code, "", traceback.format_exc())
        except Exception:  # noqa: BLE001  a script would end with exit code 1
            return vf.ProgramResult(1, "", traceback.format_exc())
        return vf.ProgramResult(0, "", "")
