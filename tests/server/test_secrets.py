"""A server's data folder has no secrets in it, and is its user's alone."""

from __future__ import annotations

import importlib
from pathlib import Path

import openai
import pytest

from tests.server.data import create, supervised, upload, wait
from tests.server.process import ServerProcess

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
KEY, TOKEN = "canary-server-key-01", "canary-hub-token-02"

EXTENSION = '''
import logging
import os
import sys

import etude

os.umask(0)
print("loaded with", dict(os.environ), file=sys.stderr)
logging.getLogger("extension").warning("the token is %s", os.environ["HUB_TOKEN"])


class Chatty(etude.Grpo):
    """Groups of episodes, compared in public."""
'''


@pytest.mark.slow
def test_no_secret_in_what_a_server_and_its_jobs_write(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "chatty.py").write_text(EXTENSION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HUB_TOKEN", TOKEN)
    data = tmp_path / "data"
    monkeypatch.setattr(ServerProcess, "log", tmp_path / "stderr.log")
    with ServerProcess(model, data, "--algorithms", "chatty:Chatty", key=KEY) as server:
        client = server.client()
        job = create(client, upload(client, supervised(4)))
        assert wait(client, job.id, "succeeded").status == "succeeded"
        with pytest.raises(openai.OpenAIError):
            client.chat.completions.create(model=KEY, messages=[{"role": "user", "content": "a"}])
        written = [path for path in data.rglob("*") if path.is_file()]
        assert any(path.name == "worker.log" for path in written)
    for path in (*written, server.log):
        if path.exists():
            text = path.read_bytes()
            assert KEY.encode() not in text and TOKEN.encode() not in text, path
    assert "the token is **********" in server.log.read_text()
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    assert importlib.import_module("canaries").readable_by_others(data) == []
