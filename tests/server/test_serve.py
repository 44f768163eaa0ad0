from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from etude.cli.app import app


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["./nowhere"], "the folder does not exist"),
        (["./nowhere", "--api-key-env", "NO_SUCH_KEY"], "NO_SUCH_KEY is not set or empty"),
        (["./nowhere", "--host", "0.0.0.0"], "there is no API key"),
        (["./nowhere", "--host", "203.0.113.1"], "there is no API key"),
        (["./nowhere", "--dtype", "int3"], "--dtype"),
        (["./nowhere", "--vllm-arg=--enforce-eager"], "there is no vLLM without --engine vllm"),
        (["./nowhere", "--vllm-device", "0"], "there is no vLLM without --engine vllm"),
        (["./nowhere", "--samplers", "2"], "there is no vLLM without --engine vllm"),
        (["./nowhere", "--samplers", "2", "--engine", "vllm"], "name one: --on auto"),
        (["./nowhere", "--on", "auto"], "Jobs train on this machine"),
    ],
)
def test_a_server_that_cannot_be_is_refused_with_what_to_do(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["serve", *arguments, "--port", "0"])
    assert done.exit_code == 2
    assert told in done.stderr
