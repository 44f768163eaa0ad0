"""The example, offline: its config, with a script in place of the models, and its summary."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.config.builder import Builder
from etude.config.load import load_config, parse_config
from etude.core.call import ChatRequest
from etude.core.keys import generator
from etude.protocols.named import PROTOCOLS
from etude.rewards.evaluation_run import EvaluationRun
from etude.rollout.collector import Collector
from etude.store.run_folder import RunFolder
from tests.support import ScriptedEngine

FOLDER = Path(__file__).parents[2] / "examples" / "code_validation"


def answer(request: ChatRequest) -> str:
    """A verifier that asks once, if it can, and then tosses a coin; provers that say the same always."""
    instructions = str(request.messages[0]["content"])
    if not instructions.startswith("You are the verifier."):
        return "Every line does what the problem asks for. Decision: accept"
    if len(request.messages) == 2 and "You can ask in" in instructions:
        return "Question for Expert_1: Why?\nQuestion for Expert_2: Why not?"
    return f"Decision: {generator(request.key, 'coin').choice(['accept', 'reject'])}"


def run_script(*arguments: str) -> str:
    command = [sys.executable, str(FOLDER / "summary.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


async def evaluate(folder: Path, **workflow: Any) -> Mapping[str, float | None]:
    """The average scores of the example's config on a few programs, with changes to its workflow."""
    data = yaml.safe_load((FOLDER / "config.yml").read_text())
    data["workflow"] |= workflow
    data["eval"]["general"]["dataset"] |= {"limit": 6, "file_path": str(FOLDER / "programs.jsonl")}
    if workflow:
        del data["eval"]["evaluators"]["prover"]
    config = parse_config(data)
    with RunFolder.create(folder, "run") as run:
        async with Builder(config) as builder:
            examples = (await builder.get_dataset(config.eval.general.dataset)).examples()
            evaluators = {name: await builder.get_evaluator(name) for name in config.eval.evaluators}
            engines = {name: ScriptedEngine(answer) for name in config.llms}
            collector = Collector(await builder.get_workflow(), engines, run.journal)
            scores = EvaluationRun(collector, evaluators, run.journal)
            output = await scores.run(examples, phase="eval")
    return {name: result.average_score for name, result in output.evaluation_results}


async def test_the_config_plays_on_the_shipped_programs_and_the_run_is_summed_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert load_config(FOLDER / "config.yml").eval.general.dataset is not None
    scores = await evaluate(tmp_path)
    accuracy, verifier = scores["accuracy"], scores["verifier"]
    assert accuracy is not None and verifier == pytest.approx(2 * accuracy - 1)
    summary = json.loads(run_script(str(tmp_path / "run"), "--json"))
    assert summary["accuracy"]["mean"] == pytest.approx(accuracy)
    assert (summary["episodes"], summary["failed"], summary["rounds"]["mean"]) == (6, 0, 3)
    shown = run_script(str(tmp_path / "run"))
    assert "worst_example_accuracy" in shown and "asked_again verifier" in shown


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_every_protocol_can_be_named_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str
):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    scores = await evaluate(tmp_path, protocol=protocol, arguments={}, policies={})
    assert scores["accuracy"] is not None
