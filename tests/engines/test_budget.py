"""Budgets of runs: an endpoint that charges, kills, going on, and the estimates beside them."""

import hashlib
import json
import math
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.core.errors import BudgetReached
from etude.engines.ledger import read_bill
from etude.verbs import evaluate, load_run, resume
from tests.cli.projects import AGENT, etude, process, rows, run_to_end
from tests.json_server import JsonServer, chat_completion
from tests.support import one_quick, wait_until

PROMPT, CACHED, COMPLETION = 2.0, 0.5, 8.0
"""USD for a million tokens of the policy; the judge costs ten times as much."""


def charged_project(
    folder: Path, url: str, *, judge_url: str = "", examples: int = 40, **changes: Any
) -> Path:
    """The path of its config, of which `changes` are keys. The judge is at `judge_url`, or there too."""

    def model(name: str, factor: float, url: str) -> dict[str, Any]:
        prices = {"prompt": PROMPT * factor, "cached": CACHED * factor, "completion": COMPLETION * factor}
        settings = {"max_tokens": 50, "max_retries": 2}
        return {"_type": "openai", "model_name": name, "base_url": url, "prices": prices, **settings}

    config: dict[str, Any] = {
        "llms": {"policy": model("policy", 1, url), "judge": model("judge", 10, judge_url or url)},
        "workflow": "agent:play",
        "eval": {
            "general": {"dataset": "train.jsonl", "max_concurrency": 16},
            "evaluators": {
                "correct": "agent:correct",
                "judged": {"_type": "llm_judge", "model": "judge", "prompt": "Good?"},
            },
        },
        "finetuning": {"target_model": "policy"},
        **changes,
    }
    (folder / "agent.py").write_text(AGENT)
    (folder / "train.jsonl").write_text(rows(examples, "t"))
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(config))
    return path


def bill_in(run: Path) -> dict[str, Any]:
    """The bill as `etude runs show --json` has it, read by another process's means."""
    return json.loads(json.dumps(read_bill(run).as_json()))


class ChargingEndpoint(JsonServer):
    """It charges before it answers, as providers do."""

    def __init__(self, *, most: float = math.inf, spoilt: int = 0, together: int = 1) -> None:
        """The first answers are given `together`, and so many at `most` before `go` is set. Every `spoilt`-th
        one is charged and cannot be used."""
        self.go = threading.Event()
        self.calls = self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.most_at_once = 0
        self._at_once = 0
        self._most, self._spoilt = most, spoilt
        self._together = threading.Barrier(together)
        self._first = together
        self._lock = threading.Lock()
        super().__init__(lambda path, headers, body: (200, self.charge(json.loads(body))))

    def usd(self, prompt: float, cached: float, completion: float) -> float:
        """The sum of what it has charged, at these prices for a million tokens."""
        fresh = self.prompt_tokens - self.cached_tokens
        return (fresh * prompt + self.cached_tokens * cached + self.completion_tokens * completion) / 1e6

    def charge(self, body: dict[str, Any]) -> dict[str, Any]:
        text = json.dumps(body["messages"])
        prompt = len(text) // 4
        draw = hashlib.blake2b(f"{text}{body.get('seed')}".encode()).digest()
        completion = 1 + draw[0] * body["max_tokens"] // 256
        with self._lock:
            self.calls += 1
            self.prompt_tokens += prompt
            self.cached_tokens += prompt // 2
            self.completion_tokens += completion
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            is_spoilt = bool(self._spoilt) and self.calls % self._spoilt == 0
            is_first, is_held = self.calls <= self._first, self.calls > self._most
        if is_first:
            self._together.wait(60)
        if is_held:
            self.go.wait()
        with self._lock:
            self._at_once -= 1
        content = "yes" if "judge" not in body["model"] else '{"reasoning": "so", "score": 5}'
        answer = chat_completion(body["model"], content, prompt, completion)
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": prompt // 2}
        return answer | {"choices": []} if is_spoilt else answer


POLICY, JUDGE = (PROMPT, CACHED, COMPLETION), (10 * PROMPT, 10 * CACHED, 10 * COMPLETION)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def alone(**general: Any) -> dict[str, Any]:
    """No judge, and so one model that is asked."""
    general = {"dataset": "train.jsonl", "max_concurrency": 16, **general}
    return {"eval": {"general": general, "evaluators": {"correct": "agent:correct"}}}


def test_the_bill_is_what_the_endpoint_has_charged(here: Path):
    with ChargingEndpoint() as policy, ChargingEndpoint() as judge:
        config = charged_project(here, policy.url, examples=6, judge_url=judge.url)
        assert etude("evaluate", config, "--name", "x").exit_code == 0
        assert etude("resume", "runs/x").exit_code == 0
        bill = bill_in(here / "runs/x")
    lines = {line["model"]: line for line in bill["lines"]}
    for name, endpoint, prices in (("policy", policy, POLICY), ("judge", judge, JUDGE)):
        assert lines[name]["calls"] == endpoint.calls == 6
        assert lines[name]["usd"] == pytest.approx(endpoint.usd(*prices), rel=1e-9)
    assert (lines["policy"]["role"], lines["judge"]["role"]) == ("agent", "judge")


@pytest.mark.parametrize("isolation", one_quick("none", "process"))
def test_sixteen_calls_at_once_end_at_most_one_percent_over(here: Path, isolation: str):
    with ChargingEndpoint(together=16) as endpoint:
        more = {"isolation": isolation} | ({"runners": 2} if isolation == "process" else {})
        config = charged_project(here, endpoint.url, examples=150, **alone(**more), budget={"usd": 0.02})
        done = run_to_end("evaluate", config, "--name", "x", folder=here, code=3)
        assert "\nbudget.usd is $0.02:" in done.stderr
        assert done.stderr.endswith("next: etude resume runs/x -o budget.usd=0.04\n")
        spent = endpoint.usd(*POLICY)
        assert 0.015 < spent <= 0.02 * 1.01
        assert endpoint.most_at_once == 16
        assert bill_in(here / "runs/x")["total"]["usd"] == pytest.approx(spent, rel=1e-9)
        again = etude("resume", "runs/x", "-o", "budget.usd=0.025")
        assert again.exit_code == 3 and "budget: usd 0.02 → usd 0.025" in again.stdout
        assert spent < endpoint.usd(*POLICY) <= 0.025 * 1.01
        assert bill_in(here / "runs/x")["total"]["usd"] == pytest.approx(endpoint.usd(*POLICY), rel=1e-9)


def test_a_run_that_is_killed_counts_each_call_once(here: Path):
    with ChargingEndpoint(most=20) as endpoint:
        config = charged_project(here, endpoint.url, examples=60, **alone(max_concurrency=4))
        running = process("evaluate", config, "--name", "x", folder=here)
        wait_until(lambda: endpoint.calls >= 24)
        os.kill(running.pid, 9)
        running.wait()
        before = bill_in(here / "runs/x")["total"]
        lost = endpoint.calls - before["calls"]
        assert (before["calls"], lost) == (20, 4), "calls under way are all that is not known"
        endpoint.go.set()
        assert etude("resume", "runs/x").exit_code == 0
        after = bill_in(here / "runs/x")["total"]
        assert after["calls"] == 60 == endpoint.calls - lost


def test_answers_that_are_charged_and_cannot_be_used_count_too(here: Path):
    with ChargingEndpoint(spoilt=3) as endpoint:
        config = charged_project(here, endpoint.url, examples=8, **alone())
        assert etude("evaluate", config, "--name", "x").exit_code == 0
        assert endpoint.calls > 8
        assert bill_in(here / "runs/x")["total"]["usd"] == pytest.approx(endpoint.usd(*POLICY), rel=1e-9)


def test_a_program_gets_an_error_that_says_how_to_go_on(here: Path):
    with ChargingEndpoint() as endpoint:
        config = charged_project(here, endpoint.url, examples=9, **alone())
        with pytest.raises(BudgetReached) as reached:
            evaluate(config, name="x", budget={"tokens": 500}, progress=False)
        assert reached.value.override == "budget.tokens=1000"
        assert 0 < load_run("x").bill.total.tokens <= 500
        run = resume("x", budget={"tokens": 5000}, progress=False)
        assert run.bill.total.calls == endpoint.calls == 9


ONE_EPOCH = {
    "enabled": True,
    "target_model": "policy",
    "reward_function": {"name": "correct"},
    "num_epochs": 1,
}


def project(folder: Path, url: str, **changes: Any) -> Path:
    """A run of 40 episodes, in one epoch, on a backend that trains by counting."""
    return charged_project(
        folder,
        url,
        examples=10,
        trajectory_builders={"grpo": {"_type": "grpo", "num_generations": 4}},
        trainer_adapters={"counting": {"_type": "tests.cli.parts:counting"}},
        finetuning={**ONE_EPOCH, "trajectory_builder": "grpo", "trainer_adapter": "counting"},
        **changes,
    )


def check(*arguments: Any) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(etude("check", "config.yml", "--json", *arguments).stdout)
    return report


def test_a_few_episodes_that_are_played_say_what_a_run_costs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ChargingEndpoint() as endpoint:
        project(tmp_path, endpoint.url)
        estimate = check("--play", 20)["estimate"]
        assert (estimate["measured_on"], endpoint.calls) == (20, 40)
        assert not (tmp_path / "runs").exists()
        assert etude("evaluate", "config.yml", "--name", "x", "--repeat", 4).exit_code == 0
    usd, whole = estimate["usd"], bill_in(tmp_path / "runs/x")["total"]
    assert estimate["training_episodes"] == 40 and estimate["calls"] == whole["calls"] == 80
    assert usd["mean"] == pytest.approx(whole["usd"], rel=0.2)
    assert usd["low"] < whole["usd"] < usd["high"]


def test_a_run_that_would_reach_its_limit_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ChargingEndpoint() as endpoint:
        project(tmp_path, endpoint.url, budget={"usd": 0.1})
        shown = etude("check", "config.yml", "--play", 8).stdout
    assert re.search(r"! budget\.usd is 0\.1, .* 0\.1", shown)
    assert "price           about $0.1" in shown
