"""`etude serve --engine vllm`: jobs make LoRA weights and whole models, and vLLM answers with them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.server.data import ASK, YES, create, supervised, upload, wait
from tests.server.process import ServerProcess
from tests.vllm import commands


@commands
def test_vllm_answers_with_what_jobs_trained_and_comes_back_from_a_crash(
    wide: Path, tmp_path: Path, command: str
) -> None:
    options = ["--engine", "vllm", "--vllm-command", command, "--vllm-arg=--enforce-eager"]
    with ServerProcess(wide, tmp_path, *options, "--engine-wait", "300") as server:
        client = server.client(timeout=300)

        def said(model: str) -> str | None:
            answer = client.chat.completions.create(model=model, messages=[ASK], temperature=0, max_tokens=5)
            return answer.choices[0].message.content

        untrained = said("tiny")
        assert untrained != YES["content"]
        hyper = {"n_epochs": 6, "batch_size": 4, "learning_rate": 0.02}
        file = upload(client, supervised(8))
        for rank in (4, 0):  # LoRA weights beside the base model, then a whole model in its place.
            job = wait(client, create(client, file, lora_rank=rank, **hyper).id)
            assert job.fine_tuned_model is not None, job.error
            assert said(job.fine_tuned_model) == YES["content"]
            assert said("tiny") == untrained
            if rank:
                lora = job.fine_tuned_model
        os.kill(json.loads((tmp_path / "vllm" / "vllm.pid").read_text())["pid"], signal.SIGKILL)
        with server.http(timeout=300) as http:
            deadline = time.monotonic() + 60
            while http.get("/engine/status").json()["restarts"] == 0:
                assert time.monotonic() < deadline
            assert said(lora) == YES["content"], "it waited for the restart"
            assert http.post("/engine/stop").json()["process"] == "stopped"
            assert http.post("/engine/start").json()["process"] == "running"
        assert said(lora) == YES["content"]


def test_a_vllm_that_is_not_there_ends_the_command(wide: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="'no-such-vllm' cannot be started"):
        ServerProcess(wide, tmp_path, "--engine", "vllm", "--vllm-command", "no-such-vllm").start()
