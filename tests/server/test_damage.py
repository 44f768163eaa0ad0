"""A server's data folder: damaged weights are said by name and never served, and no secrets are in it."""

from pathlib import Path

import openai
import pytest

from tests import canaries
from tests.server.data import ASK, create, supervised_rows, upload, wait
from tests.server.process import ServerProcess


@pytest.mark.slow
def test_a_damaged_model_is_refused_by_name_and_the_others_are_served(server: ServerProcess) -> None:
    client = server.client(max_retries=0)
    job = wait(client, create(client, upload(client, supervised_rows(4)), n_epochs=1, batch_size=4).id)
    assert job.status == "succeeded"
    weights = server.data_dir / "models" / job.id / "trained.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model=str(job.fine_tuned_model), messages=[ASK], max_tokens=1)
    assert (refused.value.status_code, refused.value.code) == (503, "model_damaged")
    assert f"{job.id}/trained.safetensors " in str(refused.value)
    client.chat.completions.create(model="tiny", messages=[ASK], max_tokens=1)
    (weights.parent / "SHA256SUMS").unlink()
    request = {"model": job.fine_tuned_model}
    further = create(client, upload(client, supervised_rows(4)), n_epochs=1, request=request)
    failed = wait(client, further.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert f"is damaged: {job.id}/SHA256SUMS is missing" in failed.error.message


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
        job = create(client, upload(client, supervised_rows(4)))
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
    assert canaries.readable_by_others(data) == []
