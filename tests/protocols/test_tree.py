"""The episode tree: values, choices, what branching holds fixed, its widths, and a play interrupted in it."""

import asyncio
import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.core.call import ChatRequest, Completion
from etude.core.episode import EpisodeRecord
from etude.core.errors import RequestError
from etude.core.evaluation import EvalInputItem
from etude.protocols import EpisodeTree, Protocol, adp, debate, mnip, most_calls, nip, play, solo_verifier
from etude.protocols.branching import check_widths, number_of_answers
from etude.protocols.catalog import PROTOCOLS
from etude.protocols.tree import Node
from etude.protocols.workflow import VerdictAccuracy, accuracy
from etude.rollout.evaluator import evaluate
from etude.store.journal import Journal
from tests.protocols.games import (
    ChanceEngine,
    Labelled,
    example,
    expected_value,
    find_agent,
    play_record,
    play_tree,
)
from tests.support import ScriptedEngine, draws, one_quick


def make_tree(*nodes: tuple[int | None, dict[str, float]], agents: tuple[str, ...] = ("a",)) -> EpisodeTree:
    """A tree of parents and rewards."""
    return EpisodeTree(
        protocol="hand",
        agents=agents,
        channels=(),
        max_rounds=9,
        truth=1,
        stance=1,
        key=0,
        bounds=dict.fromkeys(agents, (-9.0, 9.0)),
        nodes=tuple(
            Node(id=index, parent=parent, round=0, agent="a", call=index, text="", rewards=rewards)
            for index, (parent, rewards) in enumerate(nodes)
        ),
    )


def test_the_value_of_a_node_is_its_own_reward_and_the_mean_of_its_childrens_values() -> None:
    tree = make_tree((None, {"a": 0.5}), (0, {"a": 1.0}), (0, {}), (2, {"a": 3.0}), (2, {"a": -1.0}))
    assert list(tree.values("a")) == [1.5, 1.0, 1.0, 3.0, -1.0]
    assert tree.value(None, "a") == 1.5
    assert [node.id for node in tree.path(tree.nodes[4])] == [0, 2, 4]


@pytest.mark.parametrize(
    ("verdict", "truth", "right"),
    [
        (1.0, 1, 1),
        (-1.0, 1, 0),
        (-1.0, 0, 1),
        (0.2, 1, 1),
        (-0.2, 0, 1),
        (0.0, 1, 0),
        (0.0, 0, 0),
        (None, 0, 0),
    ],
)
def test_a_verdict_is_right_by_its_sign(verdict: float | None, truth: Any, right: float) -> None:
    tree = make_tree((None, {}))
    assert accuracy(replace(tree, truth=truth, nodes=(replace(tree.nodes[0], verdict=verdict),))) == right


def test_each_way_of_a_play_counts_by_how_likely_it_was() -> None:
    tree, verdicts = make_tree((None, {}), (None, {}), (0, {}), (1, {}), (1, {})), {2: 1.0, 3: 1.0}
    nodes = tuple(replace(node, verdict=verdicts.get(node.id)) for node in tree.nodes)
    assert accuracy(replace(tree, nodes=nodes)) == 0.75


async def test_what_is_no_play_has_no_score() -> None:
    (output,) = await evaluate(VerdictAccuracy(), [EvalInputItem(id="e", output_obj="text")], 5)
    assert "protocol?" in str(output.error)


async def test_the_answers_of_one_round_are_crossed_and_each_is_sampled_once(journal: Journal) -> None:
    """Two provers at once, two answers each: the verifier sees all four pairs, each twice."""
    given: dict[str, int] = defaultdict(int)

    def answer(request: ChatRequest) -> str:
        agent = find_agent(request)
        given[agent] += 1
        if agent != "verifier":
            return f"{agent}-{given[agent]}"
        heard = request.messages[-1]["content"]
        return "Decision: accept" if "prover1-2" in heard or "prover0-2" not in heard else "Decision: reject"

    protocol = debate(max_message_rounds=2, verifier_first=False)
    tree = await play_tree(protocol, ScriptedEngine(answer), journal, widths=2)
    assert given == {"prover0": 2, "prover1": 2, "verifier": 8}
    # Accepted: (1, 1), (1, 2), (2, 2); rejected: (2, 1). prover1 earns by accept, prover0 by reject.
    for agent, expected in (("prover0", [0.0, 0.5]), ("prover1", [0.5, 1.0])):
        (_, answers), *_ = tree.answers(agent)
        assert [mean(tree.value(node, agent) for node in copies) for copies in answers.values()] == expected
    assert tree.value(None, "prover0") == 0.25
    assert tree.value(None, "verifier") == 0.5


@st.composite
def protocols(draw: st.DrawFn) -> Protocol:
    name = draw(st.sampled_from(["nip", "debate", "mnip", "adp", "merlin_arthur"]))
    numbers = st.integers(-3, 3).map(float)
    terms: dict[str, Any] = {
        "verifier_reward": draw(numbers),
        "verifier_incorrect_penalty": draw(numbers),
        "verifier_terminated_penalty": draw(numbers),
        "verifier_no_guess_reward": draw(numbers),
        "prover_reward": draw(numbers),
        "shared_reward": draw(st.booleans()),
        "prover_invalid_response_penalty": draw(st.none() | numbers),
        "force_guess": draw(st.sampled_from([None, None, "accept", "truth"])),
    }
    if name in ("nip", "debate", "mnip"):
        terms |= {"max_message_rounds": 5, "min_message_rounds": draw(st.integers(1, 5))}
    if name in ("debate", "mnip") and draw(st.booleans()):
        terms |= {"sequential": True, "max_message_rounds": 7, "prover0_first": draw(st.booleans())}
    if name in ("nip", "adp", "mnip"):
        terms["randomize_prover_stance"] = draw(st.booleans())
    return PROTOCOLS[name](**terms)


def branch(protocol: Protocol, seed: int, widths: Any, **settings: Any) -> EpisodeTree:
    engines = dict.fromkeys(protocol.agents, ChanceEngine())
    about = example(seed % 2, stance=seed // 2 % 2)
    return asyncio.run(play(protocol, Labelled(), engines, about, widths=widths, seed=seed, **settings))


@settings(max_examples=draws(15), deadline=None)
@given(protocols(), st.integers(0, 99), st.sampled_from([1, 2, {"verifier": 2}, [3, 1], [1, 2, 1]]))
def test_whatever_is_played(protocol: Protocol, seed: int, widths: Any) -> None:
    tree = branch(protocol, seed, widths, retries=1)
    for agent in tree.agents:
        # What every path earns lies within the bounds, and values equal a brute-force enumeration's.
        low, high = tree.bounds[agent]
        for leaf in tree.leaves():
            total = sum(node.rewards.get(agent, 0.0) for node in tree.path(leaf))
            assert low - 1e-9 <= total <= high + 1e-9
        for node in (None, *tree.nodes[::7]):
            assert tree.value(node, agent) == pytest.approx(expected_value(tree, node, agent))
    parents = {node.parent for node in tree.nodes}
    for node in tree.nodes:
        assert node.parent is None or node.parent < node.id
        assert (node.ending is not None) == (node.id not in parents)
    # The answers of a choice stand under the same answers of the others, and come before nothing else.
    for _, answers in tree.answers():
        contexts = [
            sorted([(one.round, one.call) for one in tree.path(node) if one.id != node.id] for node in copies)
            for copies in answers.values()
        ]
        assert all(context == contexts[0] for context in contexts)
    assert EpisodeTree.from_json(json.loads(json.dumps(tree.to_json()))) == tree


@settings(max_examples=draws(15), deadline=None)
@given(protocols(), st.integers(0, 99))
def test_each_prompt_of_an_agent_begins_with_the_one_before(protocol: Protocol, seed: int) -> None:
    engine = ChanceEngine()
    engines = dict.fromkeys(protocol.agents, engine)
    tree = asyncio.run(play(protocol, Labelled(), engines, example(), seed=seed, retries=1))
    for agent in tree.agents:
        prompts = [engine.requests[node.call].messages for node in tree.nodes if node.agent == agent]
        for before, after in pairwise(prompts):
            assert list(after[: len(before)]) == list(before)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        (1, [1, 1, 1, 1]),
        (3, [3, 3, 3, 3]),
        ([4, 1], [4, 1, 1, 1]),
        ({"prover": 2}, [1, 2, 1, 2]),
        ({"prover": [1, 2, 3], "verifier": 5}, [5, 2, 5, 3]),
    ],
)
def test_widths_by_agent_and_round(widths: Any, expected: list[int]) -> None:
    turns = ["verifier", "prover", "verifier", "prover"]
    check_widths(widths, turns)
    assert [number_of_answers(widths, agent, number) for number, agent in enumerate(turns)] == expected


@pytest.mark.parametrize("widths", [0, -1, True, [], [2, 0], {"prover": 1.5}, {"prover": []}])
def test_impossible_widths_are_refused(widths: Any) -> None:
    with pytest.raises(RequestError, match="at least 1"):
        check_widths(widths, ["prover"])


@pytest.mark.parametrize(
    ("protocol", "widths", "calls"),
    [
        (solo_verifier(), 4, 4),
        (adp(), 1, 2),
        (adp(), 3, 3 + 9),
        # Two answers of each prover make four pairs: 4 calls, then one or two for each pair.
        (debate(max_message_rounds=2, verifier_first=False), {"prover0": 2, "prover1": 2}, 4 + 4),
        (debate(max_message_rounds=2, verifier_first=False), 2, 4 + 8),
        (nip(max_message_rounds=5), 2, 2 + 4 + 8 + 16 + 32),
    ],
)
def test_the_most_calls_of_a_play(protocol: Any, widths: Any, calls: int) -> None:
    assert most_calls(protocol, widths) == calls


PLAYS: list[tuple[Protocol, object]] = [
    (nip(max_message_rounds=7), 2),
    (debate(max_message_rounds=5), 2),
    (mnip(max_message_rounds=4, verifier_first=False), {"prover0": 2, "verifier": 3}),
]


class Interrupted(ChanceEngine):
    """Does not answer any more after a number of answers, like a process that is about to be killed."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.left = answers
        self.stuck = asyncio.Event()

    async def complete(self, request: ChatRequest) -> Completion:
        completion = await super().complete(request)
        self.left -= 1
        if self.left < 0:
            self.stuck.set()
            await asyncio.Event().wait()
        return completion


async def interrupt(protocol: Protocol, widths: object, path: Path, answers: int) -> set[int]:
    """Start a play and stop it after some answers; the keys of those that are kept."""
    engine = Interrupted(answers)
    with Journal(path) as journal:
        task = asyncio.ensure_future(play_record(protocol, engine, journal, widths=widths, retries=1))
        await engine.stuck.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return {value["key"] for key, value in journal.scan() if "/call/" in key}


async def finish(protocol: Protocol, widths: object, path: Path) -> tuple[EpisodeRecord, list[int]]:
    """Play to the end, with what is there; the keys of the requests that were made."""
    engine = ChanceEngine()
    with Journal(path) as journal:
        record = await play_record(protocol, engine, journal, widths=widths, retries=1)
    return record, [request.key for request in engine.requests]


@pytest.mark.parametrize(
    ("protocol", "widths"), one_quick(*PLAYS), ids=lambda value: getattr(value, "name", str(value))
)
async def test_a_play_that_is_taken_up_again_asks_nothing_twice(
    protocol: Protocol, widths: object, tmp_path: Path
) -> None:
    whole, asked = await finish(protocol, widths, tmp_path / "whole.db")
    assert len(set(asked)) == len(asked) > 15
    for cut in range(0, len(asked), 1 + len(asked) // 3):
        path = tmp_path / f"cut{cut}.db"
        kept = await interrupt(protocol, widths, path, cut)
        kept |= await interrupt(protocol, widths, path, 2) if len(asked) - cut > 8 else set()
        record, again = await finish(protocol, widths, path)
        assert not kept & set(again)
        assert record.output == whole.output
        assert [call.completion for call in record.calls] == [call.completion for call in whole.calls]
