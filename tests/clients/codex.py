"""Codex: a program that speaks the Responses API."""

from __future__ import annotations

from pathlib import Path

from tests.clients.coding_agents import solve
from tests.clients.drive import Client, Target

CLIENT = Client("@openai/codex")

_CONFIG = """\
model = "{model}"
model_provider = "etude"
web_search = "disabled"

[model_providers.etude]
name = "Etude"
base_url = "{url}"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""


@CLIENT.feature(calls=2, extends=True)
def executes(target: Target) -> None:
    def prepare(home: Path) -> None:
        (home / ".codex").mkdir()
        text = _CONFIG.format(model=target.model, url=target.base_url)
        (home / ".codex" / "config.toml").write_text(text, encoding="utf-8")

    command = ("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access")
    assert "It is done." in solve(command, {"OPENAI_API_KEY": target.api_key}, prepare)
