"""Claude Code: a program that speaks the messages of Anthropic's API."""

from __future__ import annotations

import json

from tests.clients.coding_agents import solve
from tests.clients.drive import Client, Target, same

CLIENT = Client("@anthropic-ai/claude-code")

_QUIET = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}


@CLIENT.feature(calls=2, extends=True)
def prints(target: Target) -> None:
    keys = {"ANTHROPIC_BASE_URL": target.anthropic_url, "ANTHROPIC_API_KEY": target.api_key}
    allowed = ("--model", target.model, "--allowedTools", "Bash", "--output-format", "json", "-p")
    same(json.loads(solve(("claude", *allowed), keys | _QUIET))["result"], "It is done.")


@CLIENT.feature(calls=2, extends=True)
def streams(target: Target) -> None:
    keys = {"ANTHROPIC_BASE_URL": target.anthropic_url, "ANTHROPIC_AUTH_TOKEN": target.api_key}
    allowed = ("--model", target.model, "--tools", "Bash", "--allowedTools", "Bash", "--verbose")
    lines = solve(("claude", *allowed, "--output-format", "stream-json", "-p"), keys | _QUIET).splitlines()
    same(json.loads(lines[-1])["result"], "It is done.")
