from __future__ import annotations

import threading
from pathlib import Path

import openai
import pytest

from tests.server.data import create, supervised, upload, wait, wait_for_step
from tests.server.process import ServerProcess

ASK = [{"role": "user", "content": "?"}]


def test_requests_wait_for_an_engine_that_was_put_away(server: ServerProcess) -> None:
    with server.http(timeout=60) as http:
        assert http.get("/engine/status").json()["status"] == "running"
        assert http.post("/engine/stop").json() == http.post("/engine/stop").json() | {"status": "stopped"}
        assert http.get("/engine/status").json()["models"] == []
        answers: list[object] = []
        waiting = threading.Thread(
            target=lambda: answers.append(
                server.client().chat.completions.create(model="tiny", messages=ASK, max_tokens=2)
            )
        )
        waiting.start()
        started = http.post("/engine/start").json()
        assert started["status"] == "running" and started["models"] == ["tiny"]
        waiting.join(timeout=60)
        assert len(answers) == 1


def test_after_a_while_they_are_told_to_come_again(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path, "--engine-wait", "0.2") as running, running.http() as http:
        http.post("/engine/stop")
        with pytest.raises(openai.InternalServerError) as caught:
            running.client().chat.completions.create(model="tiny", messages=ASK)
        assert caught.value.status_code == 503 and caught.value.code == "engine_unavailable"
        assert int(caught.value.response.headers["retry-after"]) >= 1
        http.post("/engine/start", timeout=60)
        running.client().chat.completions.create(model="tiny", messages=ASK, max_tokens=1)


@pytest.mark.slow
def test_a_single_job_can_ask_for_the_engines_place_also_of_the_next_server(
    model: Path, tmp_path: Path
) -> None:
    with ServerProcess(model, tmp_path) as running:
        client = running.client()
        asks = {"metadata": {"etude_free_engine": "true"}}
        job = create(client, upload(client, supervised(8)), request=asks, n_epochs=12, batch_size=2)
        wait_for_step(client, job.id, 1)
        with running.http() as http:
            status = http.get("/engine/status").json()
            assert (status["status"], status["away_for_jobs"]) == ("stopped", True)
        running.kill()
        running.start()
        client = running.client()
        assert wait(client, job.id).status == "succeeded"
        # A request waits until the engine is back, which takes no client to see to.
        client.chat.completions.create(model="tiny", messages=ASK, max_tokens=1)
        with running.http() as http:
            assert not http.get("/engine/status").json()["away_for_jobs"]
        plain = create(client, upload(client, supervised(8)), n_epochs=2, batch_size=2)
        wait_for_step(client, plain.id, 1)
        with running.http() as http:
            assert http.get("/engine/status").json()["status"] == "running"
        wait(client, plain.id)


@pytest.mark.slow
def test_the_engine_makes_way_for_jobs_and_comes_back_by_itself(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path, "--stop-engine-for-jobs", "--max-models", "1") as running:
        client = running.client()
        job = create(client, upload(client, supervised(8)), n_epochs=2, batch_size=2)
        wait_for_step(client, job.id, 1)
        with running.http() as http:
            assert http.get("/engine/status").json()["status"] == "stopped"
            # Whoever asks to start it has no say while a job trains.
            assert http.post("/engine/start").json()["status"] == "stopped"
        done = wait(client, job.id)
        assert done.fine_tuned_model is not None
        for name in ("tiny", done.fine_tuned_model, "tiny"):
            client.chat.completions.create(model=name, messages=ASK, max_tokens=1)
            with running.http() as http:
                assert http.get("/engine/status").json()["models"] == [name]
