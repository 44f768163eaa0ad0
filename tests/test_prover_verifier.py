"""The example prover_verifier: its game has the optima that it states, and its config is sound."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from etude.core.keys import generator
from etude.protocols import Act, find_protocol
from etude.protocols.growing import FinalAnswer, Play, Question

EXAMPLE = Path(__file__).parents[1] / "examples" / "prover_verifier"
MODULES = ("task", "base", "run", "words")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    """Its modules; other examples have some of the same name."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    before = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        for name in MODULES:
            sys.modules.pop(name, None)
        sys.modules.update(before)


async def accuracy(base: ModuleType, name: str, agents: dict[str, float], count: int = 600) -> float:
    """Of scripted agents in a protocol."""
    rng = generator(0, "test", name)
    protocol = find_protocol(name, base.PROTOCOLS[name])
    right = 0
    for number, instance in enumerate(base.instances("test", count, rng)):
        scripted = base.Agents(rng, **agents)
        tree = await Play(protocol, base.SCENARIO, instance, scripted, key=number).grow()
        (leaf,) = tree.leaves()
        assert leaf.malformed is None
        right += (leaf.verdict == 1) == bool(tree.truth)
    return right / count


@pytest.mark.parametrize("name", ["solo_verifier", "adp", "debate", "nip", "mnip"])
async def test_careful_agents_reach_the_optimum(example, name):
    optimum = example["task"].optimum(name)
    found = await accuracy(example["base"], name, example["base"].CAREFUL)
    # Where there is nothing to look at they toss a coin: four deviations of 600 tosses are 0.08.
    assert found == 1.0 if optimum == 1.0 else abs(found - optimum) < 0.08


@pytest.mark.parametrize("algorithm", ["grpo", "expert_iteration", "malt"])
def test_both_models_are_trained_by_each_algorithm(example, tmp_path, algorithm):
    config = example["run"].config_of(tmp_path, algorithm, 0, "nip", epochs=3)
    targets = config.finetuning.targets
    assert {name: target.trajectory_builder for name, target in targets.items()} == dict.fromkeys(
        ("prover", "verifier"), algorithm
    )
    assert [targets[name].reward_function.name for name in ("prover", "verifier")] == [
        "earned_by_prover",
        "earned_by_verifier",
    ]


class Honest:
    """Agents of the game in words that name an animal where they argue for one, and know one."""

    def __init__(self, words: ModuleType) -> None:
        self.words = words

    async def ask(self, questions: Sequence[Question]) -> list[FinalAnswer]:
        return [FinalAnswer(0, text := self.text(each), self.act(text, each)) for each in questions]

    def text(self, question: Question) -> str:
        seen = question.prompt[-1]["content"].split(", ")
        animals = [word for word in seen if word in self.words.ANIMALS]
        if question.turn.decide == "must":
            return "accept" if animals else "reject"
        return "horse" if question.turn.agent == "prover0" else next(iter(animals), "horse")

    def act(self, text: str, question: Question) -> Act:
        act = self.words.Words().parse(text, question.turn)
        assert isinstance(act, Act)
        return act


@pytest.mark.parametrize("name", ["nip", "debate"])
async def test_in_words_an_animal_that_is_not_there_convinces_nobody(example, name):
    words = example["words"]
    protocol = find_protocol(name, {"max_message_rounds": 2, "verifier_first": False})
    for number, instance in zip(range(50), words.held_out(), strict=False):
        tree = await Play(protocol, words.Words(), instance, Honest(words), key=number).grow()
        (leaf,) = tree.leaves()
        assert leaf.malformed is None and (leaf.verdict == 1) == bool(instance.expected)


def test_the_configs_are_sound_as_they_are(example):
    from etude.config.load import load_config

    assert load_config(EXAMPLE / "config.yml").finetuning.num_epochs == 40
    assert load_config(EXAMPLE / "words.yml").finetuning.targets["verifier"].warm_up
