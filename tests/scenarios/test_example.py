"""The example, offline: its programs, and its config with a script in place of the models."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from etude.config.builder import Builder
from etude.config.load import load_config, parse_config
from etude.core.call import ChatRequest
from etude.core.keys import generator
from etude.rewards.evaluation_run import EvaluationRun
from etude.rollout.collector import Collector
from etude.scenarios.sandbox.run import call_function
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


async def evaluate(folder: Path, **workflow: Any) -> Mapping[str, float | None]:
    """The average scores of the example's config on a few programs, with changes to its workflow."""
    data = yaml.safe_load((FOLDER / "config.yml").read_text())
    data["workflow"] |= workflow
    data["eval"]["general"]["dataset"]["limit"] = 6
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


async def test_the_shipped_programs_are_right_and_wrong_as_they_say():
    rows = [json.loads(line) for line in (FOLDER / "programs.jsonl").read_text().splitlines()]
    assert [row["apps_problem_id"] for row in rows] == list(range(180))
    assert {row["apps_split"] for row in rows} == {"train", "test"}
    for row in random.Random(0).sample(rows, 3):
        given = json.loads(row["input_output"])
        passed = []
        for program in (*row["solutions"], *row["buggy_solutions"]):
            result = await call_function(program["solution"], given["fn_name"], given["inputs"])
            returned = zip(result.returned, given["outputs"], strict=True)
            passed.append(sum(each.value == output for each, output in returned))
        assert passed[0] == len(given["outputs"]) > passed[1] > 0


async def test_the_config_plays_on_the_shipped_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    assert load_config(FOLDER / "config.yml").eval.general.dataset is not None
    scores = await evaluate(tmp_path)
    accuracy, verifier = scores["accuracy"], scores["verifier"]
    assert accuracy is not None and verifier == pytest.approx(2 * accuracy - 1)
