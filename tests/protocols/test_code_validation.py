"""Prompts, answers, truth and stance of code validation; and the example, offline."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config.builder import Builder
from etude.config.load import load_config
from etude.core.call import ChatRequest
from etude.core.episode import Example
from etude.core.errors import RequestError
from etude.core.keys import generator
from etude.protocols import SCALES, Move, Protocol, Role, Turn, Verdict
from etude.protocols.catalog import PROTOCOLS
from etude.protocols.code_validation import PROMPTS, CodeValidation
from etude.protocols.sandbox import call_function
from etude.protocols.scenario import Log, agent_log
from etude.protocols.tree import VERDICTS, Node
from etude.rollout.collector import Collector
from etude.rollout.evaluation import JournalledEvaluation
from etude.store.run_folder import RunFolder
from tests.support import ScriptedEngine

EXAMPLE = Example(
    "double",
    {
        "question": "Print twice n & no more: $2 is 'twice' $1.",
        "solution": "n = int(input())\nprint(n < 2 > 1)",
    },
    0,
)
SCENARIO = CodeValidation()

CASES: dict[str, list[dict[str, Any]]] = {
    "nip": [{}, {"randomize_prover_stance": True}, {"verifier_first": False, "min_message_rounds": 3}],
    "adp": [{}, {"randomize_prover_stance": True}],
    "debate": [{}, {"sequential": True}, {"verifier_first": False}],
    "merlin_arthur": [{}],
    "mnip": [{}, {"randomize_prover_stance": True}, {"sequential": True, "prover0_first": False}],
    "solo_verifier": [{}],
}
ALL = pytest.mark.parametrize(
    "protocol",
    [PROTOCOLS[name](**arguments) for name, several in CASES.items() for arguments in several],
    ids=lambda protocol: protocol.name,
)


def turns(protocol: Protocol, stance: Verdict = 1) -> Iterator[tuple[str, Turn, Log]]:
    """All turns of a protocol that goes on to its end, with all that was said before."""
    for key, rounds in enumerate(protocol.schedules):
        path: list[Node] = []
        for number, taken in enumerate(rounds):
            for turn in taken:
                log = agent_log(protocol, path, turn.agent, number, stance=stance, key=key)
                yield turn.agent, turn, log
            for turn in taken:
                said = dict.fromkeys(turn.writes, "said")
                path.append(Node(len(path), None, number, turn.agent, len(path), "said", said))


def system_prompt(
    protocol: Protocol, agent: str, *, stance: Verdict = 1, scenario: CodeValidation = SCENARIO
) -> str:
    """The system prompt of an agent; it is the same in all of its turns."""
    found = {
        scenario.render(EXAMPLE, log, turn.agent, turn)[0]["content"]
        for name, turn, log in turns(protocol, stance)
        if name == agent
    }
    (system,) = found
    return str(system)


# What every prompt has.


@ALL
def test_every_turn_has_a_prompt_with_the_problem_and_the_program_as_they_are(protocol: Protocol):
    for agent in protocol.agents:
        system = system_prompt(protocol, agent)
        assert "Print twice n & no more: $2 is 'twice' $1." in system
        assert "```python\nn = int(input())\nprint(n < 2 > 1)\n```" in system
        assert f"You are {'the verifier' if agent == 'verifier' else protocol.label(agent)}." in system
        assert "  " not in system.replace("    ", "") and "\n\n\n" not in system
    assert {name for name in PROMPTS if name.startswith(f"{protocol.name}/")}


@ALL
def test_every_prover_is_told_what_it_is_paid_for(protocol: Protocol):
    for stance, (agent, role) in itertools.product(VERDICTS, protocol.agents.items()):
        if role.stance is None:
            continue
        argued = stance if role.stance == "example" else role.stance
        system = system_prompt(protocol, agent, stance=stance)
        right, other = ("right", "wrong") if argued else ("wrong", "right")
        assert f"You argue that the program is {right}," in system
        assert f"never say that it is {other}." in system


@ALL
def test_the_verifier_is_told_no_more_of_the_stances_than_it_can_know(protocol: Protocol):
    accept, reject = (system_prompt(protocol, "verifier", stance=stance) for stance in VERDICTS)
    assert accept == reject
    stances = [role.stance for role in protocol.agents.values()]
    assert accept.count("argues that the program is right") == stances.count(1)
    assert accept.count("argues for the side that it was given") == stances.count("example")
    assert ("same side" in accept) == (protocol.name == "mnip")
    assert ("not told whose message" in accept) == (protocol.name == "merlin_arthur")


# How to decide, and when.


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_each_scale_is_explained_and_answers_that_follow_it_are_read(scale: Any):
    said = system_prompt(PROTOCOLS["nip"](verifier_decision_spectrum=scale.name), "verifier")
    numbers = all(text.isdecimal() for text in scale.texts)
    if numbers:
        assert f"from {scale.texts[0]} (surely wrong) to {scale.texts[-1]} (surely right)" in said
    turn = Turn("verifier", (), "must", scale)
    for text, value in scale.options:
        assert numbers or f"`Decision: {text}`" in said
        assert SCENARIO.parse(f"Decision: {text}", turn) == Move({}, value)


@ALL
def test_to_decide_now_is_said_before_the_last_turn_of_the_verifier_and_never_else(protocol: Protocol):
    several = sum(turn.agent == "verifier" for turns in protocol.schedules[0] for turn in turns) > 1
    for agent, turn, log in turns(protocol):
        last = SCENARIO.render(EXAMPLE, log, agent, turn)[-1]
        assert last["role"] == "user"
        is_last = agent == "verifier" and turn.decide == "must"
        assert ("This is your last turn: decide now." in last["content"]) == (is_last and several)


def test_numbers_of_turns_are_those_of_the_schedule():
    short = PROTOCOLS["nip"](max_message_rounds=5)
    assert "ask in at most 2 of your turns" in system_prompt(short, "verifier")
    assert "in at most 2 turns" in system_prompt(short, "prover")
    assert "You have one turn, and decide in it." in system_prompt(PROTOCOLS["adp"](), "verifier")


# Truth, stance, and templates of one's own.


def test_the_truth_is_what_the_example_expects():
    for expected, verdict in ((1, 1), (0, 0), (True, 1), ("1", 1), ("0", 0), ("accept", 1), ("reject", 0)):
        assert SCENARIO.truth(Example("x", {}, expected)) == verdict
    for expected in (None, "maybe", 2, [1]):
        with pytest.raises(RequestError, match=r"example 'x': expected .* 1 \(right\) or 0"):
            SCENARIO.truth(Example("x", {}, expected))


@given(st.text(min_size=1), st.text(min_size=1))
def test_no_letter_of_problem_and_program_is_escaped_or_filled_in(question: str, solution: str):
    agent, turn, log = next(turns(PROTOCOLS["solo_verifier"]()))
    example = Example("x", {"question": question, "solution": solution})
    system = str(SCENARIO.render(example, log, agent, turn)[0]["content"])
    assert question.strip("\n") in system and solution.strip("\n") in system


def test_a_subclass_can_replace_templates():
    protocol = PROTOCOLS["debate"]()

    class Mine(CodeValidation):
        prompts: ClassVar = {**PROMPTS, "debate/prover1": "I am $label: $stance"}

    mine = Mine()
    assert system_prompt(protocol, "prover1", scenario=mine).startswith("I am Expert_2: You argue that")
    assert system_prompt(protocol, "prover0", scenario=mine) == system_prompt(protocol, "prover0")


def test_a_protocol_of_ones_own_has_prompts_for_known_kinds_only():
    def own(kind: str) -> Protocol:
        return Protocol(
            name="duel",
            agents={"a": Role("prover", stance=0), "b": Role(kind, may_decide=True)},
            channels={"main": frozenset({"a", "b"})},
            schedules=(((Turn("a", ("main",)),), (Turn("b", (), "must"),)),),
            payoff=lambda outcome: {},
        )

    assert "You are a." in system_prompt(own("verifier"), "a")
    with pytest.raises(RequestError, match=r"no prompt for 'jury', .*'b' in 'duel'"):
        system_prompt(own("jury"), "b")


FOLDER = Path(__file__).parents[2] / "examples" / "code_validation"


def answer(request: ChatRequest) -> str:
    """A verifier that asks once, if it can, and then tosses a coin; provers that say the same always."""
    instructions = str(request.messages[0]["content"])
    if not instructions.startswith("You are the verifier."):
        return "Every line does what the problem asks for. Decision: accept"
    if len(request.messages) == 2 and "You can ask in" in instructions:
        return "Question for Expert_1: Why?\nQuestion for Expert_2: Why not?"
    return f"Decision: {generator(request.key, 'coin').choice(['accept', 'reject'])}"


async def test_the_shipped_programs_are_right_and_wrong_as_they_say():
    rows = [json.loads(line) for line in (FOLDER / "programs.jsonl").read_text().splitlines()]
    assert [row["apps_problem_id"] for row in rows] == list(range(180))
    assert {row["apps_split"] for row in rows} == {"train", "test"}
    for row in random.Random(0).sample(rows, 1):
        given = json.loads(row["input_output"])
        passed = []
        for program in (*row["solutions"], *row["buggy_solutions"]):
            result = await call_function(program["solution"], given["fn_name"], given["inputs"])
            returned = zip(result.returned, given["outputs"], strict=True)
            passed.append(sum(each.value == output for each, output in returned))
        assert passed[0] == len(given["outputs"]) > passed[1] > 0


async def test_the_config_plays_on_the_shipped_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    config = load_config(FOLDER / "config.yml", ["eval.general.dataset.limit=6"])
    with RunFolder.create(tmp_path, "run") as run:
        async with Builder(config) as builder:
            examples = (await builder.get_dataset(config.eval.general.dataset)).examples()
            evaluators = {name: await builder.get_evaluator(name) for name in config.eval.evaluators}
            engines = {name: ScriptedEngine(answer) for name in config.llms}
            collector = Collector(await builder.get_workflow(), engines, run.journal)
            output = await JournalledEvaluation(collector, evaluators, run.journal).run(
                examples, phase="eval"
            )
    scores = {name: result.average_score for name, result in output.evaluation_results}
    assert len(examples) == 6 and scores["accuracy"] is not None
    assert scores["verifier"] == pytest.approx(2 * scores["accuracy"] - 1)
