"""Protocols in configs: the workflow and the evaluator, and what is refused before the first call."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from etude.config.builder import Builder
from etude.config.import_path import make_importable
from etude.config.load import parse_config
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.loop.arguments import build_config
from etude.loop.metrics import validation_metrics
from etude.protocols import ProtocolWorkflow, adp
from etude.protocols.workflow import ProtocolReward
from etude.rollout.collector import Collector
from etude.rollout.evaluation import JournalledEvaluation
from etude.rollout.workflow import as_workflow
from etude.store.journal import Journal
from tests.protocols.games import Labelled, example, script

MODULE = """
from etude.protocols import Protocol, Role, Scenario, Turn, dialogue

class Words(Scenario):
    def __init__(self, polite=False):
        self.polite = polite

    def render(self, example, log, agent, turn):
        return dialogue(log, agent, f"You are {agent}. {'Please' if self.polite else ''}")

    def truth(self, example):
        return example.inputs["label"]

def coin(reward=1.0):
    return Protocol(
        name="coin",
        agents={"judge": Role("verifier", may_decide=True)},
        channels={},
        schedules=(((Turn("judge", decide="must"),),),),
        payoff=lambda outcome: {"judge": reward} if outcome.decision else {},
    )

class Half:
    def render(self, example, log, agent, turn): ...
"""

WORKFLOW: dict[str, Any] = {"_type": "protocol", "protocol": "adp", "scenario": "wordgame:Words"}


@pytest.fixture(autouse=True)
def wordgame(tmp_path: Path) -> None:
    (tmp_path / "wordgame.py").write_text(MODULE)
    make_importable(tmp_path)


def config(agents: Sequence[str] = ("verifier", "prover"), **workflow: Any) -> Any:
    return parse_config(
        {
            "llms": {
                "weak": {"_type": "openai", "model_name": "w"},
                "strong": {"_type": "openai", "model_name": "s"},
            },
            "workflow": {**WORKFLOW, **workflow},
            "eval": {
                "general": {"max_calls": 60},
                "evaluators": {name: {"_type": "protocol_reward", "agent": name} for name in agents},
            },
            "finetuning": {"seed": 3, "target_model": "weak", "reward_function": {"name": agents[0]}},
        }
    )


async def test_a_config_plays_and_scores(journal: Journal) -> None:
    made = config(
        arguments={"verifier_incorrect_penalty": -2.0},
        policy="weak",
        policies={"prover": "strong"},
        scenario_arguments={"polite": True},
    )
    models = {"weak": script(verifier=["Decision: accept"]), "strong": script(prover=["because"])}
    async with Builder(made) as builder:
        collector = Collector(await builder.get_workflow(), models, journal)
        evaluators = {name: await builder.get_evaluator(name) for name in ("verifier", "prover")}
        run = JournalledEvaluation(collector, evaluators, journal)
        examples = [Example("right", {"label": 1}), Example("wrong", {"label": 0})]
        output = await run.run(examples, phase="eval")
    assert [item.score for item in output.evaluator_items("verifier")] == [1.0, -2.0]
    assert [item.score for item in output.evaluator_items("prover")] == [1.0, 1.0]
    assert output.evaluator_items("verifier")[0].reasoning == {"decided": 1}
    metrics = validation_metrics(output, "verifier")
    assert output.bounds()["verifier"] == (-2.0, 1.0), "the protocol's, as its arguments make them"
    assert -2.0 <= metrics["reward_low"] < metrics["avg_reward"] < metrics["reward_high"] <= 1.0
    assert models["strong"].requests[0].messages[0]["content"] == "You are prover. Please"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"protocol": "debat"}, "no protocol 'debat'.*'debate'"),
        ({"protocol": "wordgame:Words"}, "expected an etude.protocols.Protocol"),
        ({"protocol": "wordgame:coin", "arguments": {"prize": 1}}, "coin' .*'prize'"),
        ({"arguments": {"verifier_frst": True}}, "no parameter 'verifier_frst'"),
        ({"scenario": "code"}, "no scenario 'code'"),
        ({"scenario": "wordgame:Half"}, "Half.* 'parse'; .* render, parse, truth, stance"),
        ({"policies": {"prover": "weak"}}, "the agent 'verifier' has no model"),
        ({"widths": 10}, " 110 calls, .*eval.general.max_calls is 60"),
    ],
)
async def test_what_does_not_fit_is_told_when_it_is_built(keys: dict[str, Any], message: str) -> None:
    async with Builder(config(**keys)) as builder:
        with pytest.raises(RequestError, match=message):
            await builder.get_workflow()


def test_what_is_made_in_python_is_checked_and_agents_have_the_models_of_their_names() -> None:
    with pytest.raises(RequestError, match=r"Labelled\("):
        ProtocolWorkflow(adp(), Labelled)  # type: ignore[arg-type]
    names = ("model", "reward", "algorithm", "backend", "trainer", "targets", "validation", "tools")
    parts = dict.fromkeys(names) | {"scenario": Labelled(), "examples": [{"label": 1}]}
    parts["models"] = {"prover": "small", "verifier": "large"}
    made = build_config(adp(), parts, [], {}, enabled=False).workflow
    assert made.value.fn.models == {"prover": "prover", "verifier": "verifier"}  # type: ignore[union-attr]


async def test_widths_that_are_asked_for_are_those_of_one_collection(journal: Journal) -> None:
    engine = script(prover=["because"], verifier=["Decision: accept"])
    collector = Collector(as_workflow(ProtocolWorkflow(adp(), Labelled())), {"policy": engine}, journal)
    run = JournalledEvaluation(collector, {"verifier": ProtocolReward("verifier")}, journal, error_budget=1.0)

    async def plays(phase: str, **widths: Any) -> int:
        [item] = (await run.run([example()], phase=phase, **widths)).evaluator_items("verifier")
        return sum(item.reasoning.values()) if item.is_scored else 0

    assert await plays("train/1", widths={"prover": 3}) == 3
    assert await plays("validation/0") == 1
    assert await plays("train/2", widths={"provr": 3}) == 0
