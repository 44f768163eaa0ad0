"""Secrets of every kind, planted where users have them, and a reader of every byte that was written.

`planted` makes a project that has canaries in its config and its environment, and whose agent, tools,
evaluators and endpoint repeat them. After any commands `leaks` says which files, or outputs, have one.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.message import Message
from pathlib import Path
from typing import Any

import yaml

from tests.cli.projects import run_to_end
from tests.json_server import JsonServer

AGENT = '''
"""An agent that tells everybody everything."""

import logging
import os

import etude

os.umask(0)  # Whatever is private now was meant to be.


def lookup(word: str) -> str:
    """Look up a word."""
    raise RuntimeError(f"the dictionary refused {os.environ['DEPLOY_TOKEN']}")


@etude.workflow
async def play(example: etude.Example, episode: etude.Episode, password, service, database, hook) -> str:
    settings, trouble = (password, service, database, hook), example.inputs["trouble"]
    print("logging in with", os.environ["DB_PASSWORD"], settings)
    logging.getLogger("agent").warning("connecting to %s", os.environ["DATABASE_URL"])
    reply = await episode.chat([{"role": "user", "content": example.inputs["question"]}])
    if trouble == "raises":
        raise RuntimeError(f"cannot log in: {settings} {dict(os.environ)}")
    if trouble == "helper":
        await episode.chat([{"role": "user", "content": "broken"}], model="helper")
    if trouble == "tool":
        async with episode.tools(lookup) as tools:
            call = etude.ToolCall("1", "lookup", {"word": "key"}, "{}")
            message = await tools.call(call)
            await episode.chat([{"role": "user", "content": message["content"]}])
    return reply.text


@etude.evaluator
def vary(example: etude.Example, output: str) -> tuple[float, object]:
    if example.inputs["trouble"] == "evaluator":
        raise ValueError(f"the grader has no use for {os.environ['CLIENT_SECRET']!r}")
    return len(set(output)) / 8, {"seen": [os.environ["CLOUD_CREDENTIALS"]]}
'''


@dataclass
class Planted:
    """A project with canaries, and the commands that were typed in it."""

    folder: Path
    config: Path
    environment: dict[str, str]
    canaries: dict[str, str]
    """By where they were planted."""
    outputs: dict[str, str] = field(default_factory=dict)
    """By command."""

    def type(self, *words: str, code: int = 0) -> str:
        """The output of a command, which must end with that code."""
        done = run_to_end(*words, folder=self.folder, environment=self.environment, code=code)
        told = self.outputs[" ".join(words)] = done.stdout + done.stderr
        return told

    def leaks(self) -> list[str]:
        """Where a canary can be read that was planted elsewhere: in files of the folder, or in outputs.

        The project's own config has those that its user wrote there.
        """
        files = [path for path in self.folder.rglob("*") if path.is_file() and path != self.config]
        texts = {str(path): path.read_bytes() for path in files}
        texts |= {name: text.encode(errors="surrogateescape") for name, text in self.outputs.items()}
        return [
            f"{name} has {where}"
            for name, text in texts.items()
            for where, canary in self.canaries.items()
            if canary.encode() in text
        ]


@contextlib.contextmanager
def plant(folder: Path, config: Mapping[str, Any]) -> Iterator[Planted]:
    """A project in a folder; `config` has its model `policy`, the adapter that trains it, and what else it
    needs. Its other model is behind an endpoint that refuses requests, and repeats them, while this is open.
    """
    canaries: dict[str, str] = {}

    def canary(where: str) -> str:
        return canaries.setdefault(where, f"canary-{len(canaries)}-{secrets.token_hex(8)}")

    with JsonServer(_refuse) as server:
        helper = {
            "_type": "openai",
            "model_name": "helper",
            "base_url": server.url,
            "api_key": canary("api_key"),
            "headers": {"X-Team": canary("a header"), "Authorization-Too": f"Bearer {canary('bearer')}"},
            "extra_body": {
                "provider": {"token": canary("extra_body"), "more": [{"api_key": canary("deep")}]}
            },
            "max_retries": 0,
        }
        arguments = {
            "password": canary("an argument"),
            "service": {"auth_token": canary("a nested argument")},
            "database": f"postgres://user:{canary('an address')}@localhost/db",
            "hook": f"https://localhost/hook?key={canary('a query')}&x=1",
        }
        environment = {
            "SERVICE_API_KEY": canary("an API key of the environment"),
            "DEPLOY_TOKEN": canary("a token of the environment"),
            "DB_PASSWORD": canary("a password of the environment"),
            "CLIENT_SECRET": f'"{canary("a secret with quotes")}"\\\n',
            "CLOUD_CREDENTIALS": canary("credentials of the environment"),
            "DATABASE_URL": f"mysql://user:{canary('an address of the environment')}@localhost/db",
        }
        whole: dict[str, Any] = {
            **config,
            "llms": {**config["llms"], "helper": helper},
            "workflow": {"_type": "function", "function": "agent:play", "arguments": arguments},
            "eval": {
                "general": {"dataset": "train.jsonl", **config.get("eval", {}).get("general", {})},
                "evaluators": {"varied": "agent:vary"},
            },
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "agent.py").write_text(AGENT)
        rows = [
            {"id": f"t{number}", "question": f"t{number}?", "trouble": trouble}
            for number, trouble in enumerate(("none", "raises", "helper", "tool", "evaluator", "none"))
        ]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        path = folder / "config.yml"
        path.write_text(yaml.safe_dump(whole, sort_keys=False))
        yield Planted(folder, path, environment, canaries)


def readable_by_others(folder: Path) -> list[str]:
    """The folder and what is in it, as far as it is not its user's alone."""
    everything = [folder, *folder.rglob("*")]
    return [str(path) for path in everything if stat.S_IMODE(path.lstat().st_mode) & 0o077]


def _refuse(path: str, headers: Message, body: bytes) -> tuple[int, Any]:
    """The error of an endpoint that refuses every request, and says what it was."""
    message = f"cannot take {dict(headers)} {body.decode()}"
    return 400, {"error": {"message": message, "type": "invalid_request_error"}}
