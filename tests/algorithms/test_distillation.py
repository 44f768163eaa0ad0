"""On-policy distillation: a teacher's word on every token, in this process and from an endpoint."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from etude.algorithms.distillation import Distillation
from etude.config.load import parse_config
from etude.core.errors import ConfigError
from etude.inference.openai_compatible import OpenAiEngine
from etude.inference.openai_config import OpenAiLlmConfig
from etude.learner.packed import logprobs_of
from etude.store.run_folder import RunFolder
from etude.verbs import train_in
from tests.algorithms.test_grpo import sample
from tests.backends.test_local import AGENT
from tests.learner.trees import forest
from tests.models.tiny_models import fresh_policy, true_logprobs


def taught(reward, teacher, student):
    one = sample(reward, len(teacher))
    return replace(one, teacher_logprobs=(0.0, *teacher), logprobs=(0.0, *student))


def test_an_advantage_is_what_the_teacher_gives_a_token_more_than_the_policy():
    group = [taught(1.0, [-0.5, -2.0], [-1.0, -1.0]), taught(0.0, [-1.0], [-1.5])]
    alone, _ = Distillation().units([group])
    assert [unit[0].advantages for unit in alone] == [(0, 0.5, -1.0), (0, 0.5)]
    both, _ = Distillation(reward_weight=2.0, teacher_weight=0.5).units([group])
    assert [unit[0].advantages for unit in both] == [(0, 2.25, 1.5), (0, -1.75)]


def test_scores_are_the_models_logprobs_at_the_temperature_of_the_sample():
    policy, samples = fresh_policy(), forest(2, 6, temperatures=(1.0, 0.7))
    for one, scores in zip(samples, logprobs_of(policy, samples, token_budget=40), strict=True):
        true = [0.0, *true_logprobs(policy, one.ids[:1], one.ids[1:], one.turns[0].sampling.temperature)]
        expected = [value if sampled else 0.0 for value, sampled in zip(true, one.mask, strict=True)]
        assert scores == pytest.approx(expected, abs=1e-4)


def config(**options):
    llm = {"_type": "local", "max_tokens": 8, "device": "cpu"}
    return parse_config(
        {
            "llms": {"policy": llm | {"model": "model"}, "expert": llm | {"model": "expert"}},
            "workflow": "tests_local_agent:play",
            "eval": {
                "general": {"dataset": "train.json"},
                "evaluators": {"varied": "tests_local_agent:varied"},
            },
            "trajectory_builders": {"distil": {"_type": "distillation", "num_generations": 2} | options},
            "trainer_adapters": {"local": {"_type": "local", "learning_rate": 1e-2}},
            "finetuning": {"enabled": True, "num_epochs": 2, "target_model": "policy", "seed": 7},
        }
    )


async def test_a_run_learns_from_a_teacher_in_this_process_and_asks_it_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tests_local_agent.py").write_text(AGENT)
    rows = [{"id": f"e{number}", "question": f"what is {number} plus 1?"} for number in range(2)]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    fresh_policy(max_context=128).export(tmp_path / "model")
    expert = fresh_policy(max_context=128)
    for parameter in expert.trainable().values():
        parameter.data.mul_(1.5)
    expert.export(tmp_path / "expert")
    with pytest.raises(ConfigError, match="teacher"):
        config(teacher="nobody")
    with RunFolder.create(tmp_path / "runs", "run") as run:
        outcome = await train_in(config(teacher="expert"), run)
        assert len({outcome.version(wish).chosen.version.digest for wish in ("v1", "v2")}) == 2
        jobs = outcome.jobs
        asked = [key for key, _ in run.journal.scan("teacher/expert/")]
        assert len(asked) == len(set(asked)) == 2, "once an epoch"
    with RunFolder.open(tmp_path / "runs" / "run") as run:
        again = await train_in(config(teacher="expert"), run)
        assert again.jobs == jobs
        assert len(list(run.journal.scan("teacher/expert/"))) == len(asked)


class Endpoint(BaseHTTPRequestHandler):
    told: object = None

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert (self.path, body["max_tokens"], body["prompt_logprobs"]) == ("/v1/completions", 1, 0)
        rows = [None, *({str(token): {"logprob": -token / 10}} for token in body["prompt"][1:])]
        answer = {"choices": [{"text": "", "prompt_logprobs": rows if self.told is None else self.told}]}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Silent."""


@pytest.fixture
def endpoint(monkeypatch):
    server = HTTPServer(("127.0.0.1", 0), Endpoint)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}/v1"
    yield OpenAiEngine(OpenAiLlmConfig(base_url=address, model_name="large", api_key="x", max_retries=0))
    server.shutdown()
    thread.join()


async def test_an_endpoint_scores_token_ids(endpoint):
    assert await endpoint.score((7, 3, 5)) == (0.0, -0.3, -0.5)
    await endpoint.close()
