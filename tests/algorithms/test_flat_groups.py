"""Groups of equal reward: the advantages that the algorithm gives decide, and the terms of its loss."""

from dataclasses import replace
from typing import Any

import pytest

import etude
from etude.algorithms.collecting import CollectingBuilder
from etude.algorithms.distillation import Distillation
from etude.algorithms.grpo import NO_ADVANTAGE, Grpo, ReinforcePP, Rloo
from etude.algorithms.samples import IDLE, ScoredEpisode, Tally, targeted_calls
from etude.core.episode import WORKFLOW
from etude.core.errors import TrainingError
from tests.algorithms.scripted_episodes import conversation, episode
from tests.training import Run, ScriptedEngine, examples


class Priced(etude.Grpo):
    """Answers pay for their length, by advantages of the whole batch."""

    def assign_advantages(self, groups):
        def price(one):
            return replace(one, advantages=one.by_token([len(one.ids) - 10.0] * len(one.turns)))

        return [[*map(price, group)] for group in groups]


class Constant(etude.Grpo):
    """REINFORCE without a baseline: what everybody earned is an advantage too."""

    def compare(self, rewards):
        return list(rewards)


def group(*replies: str, reward: float = 0.3) -> list[ScoredEpisode]:
    records = [episode(conversation("q", reply), generation=n) for n, reply in enumerate(replies)]
    return [ScoredEpisode(each, reward, targeted_calls(each, {WORKFLOW}, None)) for each in records]


def keeps(algorithm: Any, replies: tuple[str, ...] = ("a", "bb", "cccccccccccc")) -> tuple[bool, bool, Tally]:
    """Whether a group of equal reward is trained on, whether it counts as compared, and the counts."""
    tally = Tally()
    (made,) = algorithm.groups([group(*replies)], tally)
    return bool(made.units), algorithm.find_comparable([made])[0], tally


@pytest.mark.parametrize(
    ("algorithm", "is_kept", "is_compared"),
    [
        (Grpo(), False, False),
        (Rloo(), False, False),
        (Grpo(variant="dr_grpo"), False, False),
        (Priced(), True, True),
        (Constant(), True, True),
        (Grpo(beta=0.1), True, False),
        (Rloo(entropy_bonus=0.1), True, False),
        (Grpo(drop_flat_groups=False), True, False),
        (ReinforcePP(), True, False),
        (ReinforcePP(drop_flat_groups=True), False, False),
        (Distillation(), True, False),
        (Distillation(drop_flat_groups=True, reward_weight=1.0), False, False),
    ],
    ids=str,
)
def test_a_group_of_equal_reward_is_kept_for_what_it_teaches(algorithm, is_kept, is_compared):
    found_kept, found_compared, tally = keeps(algorithm)
    assert (found_kept, found_compared) == (is_kept, is_compared)
    assert tally.left_out == ({} if is_kept else {NO_ADVANTAGE: 1})


def test_a_flat_group_counts_in_the_mean_over_tokens():
    """With a term of the loss besides, its tokens are trained on, so the others' weigh less."""
    algorithm = Grpo(beta=0.1)
    flat = group("a", "bb")
    other = [replace(scored, reward=float(number)) for number, scored in enumerate(group("c", "dd"))]
    made = algorithm.groups([flat, other], Tally())
    units = algorithm.units([each.samples for each in made])
    assert [sample.has_gradient for (sample,) in units] == [False, False, True, True]
    count = sum(sum(sample.mask) for (sample,) in units)
    assert algorithm.weight_factors(units) == [[pytest.approx(1 / count)]] * 4
    flat_ones = [each.samples for each in made[:1]]
    assert algorithm.reason_to_skip(flat_ones) is None and algorithm.reason_to_skip(flat_ones, at_base=True)
    assert Grpo(beta=0.1, entropy_bonus=0.1).reason_to_skip(flat_ones, at_base=True) is None
    assert Grpo(drop_flat_groups=False).reason_to_skip(flat_ones)
    masked = [[sample.scale_weights([0.0]) for sample in each.samples] for each in made]
    assert "`cut_off` masks them" in algorithm.reason_to_skip(masked).reason


def test_what_rounding_leaves_of_equal_rewards_is_no_advantage():
    assert Grpo(advantage_scale="none").compare([0.1] * 3) == [0.0] * 3
    (made,) = Rloo().groups([group("a", "b", "c", reward=0.1)], Tally())
    assert made.units == []


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path / "run")
    made.examples = examples(8)
    made.evaluator = lambda example, output: 1.0
    made.engine = ScriptedEngine(lambda request: "yes" * (1 + request.key % 5))
    return made


async def test_without_anything_that_moves_the_policy_an_epoch_is_skipped(run):
    """REINFORCE++ keeps its groups, and a batch of equal rewards has no advantage all the same."""
    run.builder = CollectingBuilder(ReinforcePP(num_generations=4))
    with pytest.raises(TrainingError, match=f"8 × {IDLE}"):
        await run.start(num_epochs=1)


async def test_the_kl_counts_once_the_policy_has_moved_and_is_nothing_to_compare(run):
    """The groups are trained on, and dynamic sampling looks for better ones."""
    options = {"num_generations": 4, "examples_per_epoch": 3, "replace_flat_groups": 2}
    run.builder = CollectingBuilder(Grpo(beta=0.1, **options))
    run.evaluator = lambda example, output: 0.0 if run.engine.version else len(output) / 20
    first, second = (await run.start(num_epochs=2)).history.epochs
    assert first.metrics["reward_groups"]["flat"] == 0
    assert second.is_trained and second.metrics["filtered_trajectories"] == 20
    assert second.metrics["reward_groups"] == {"compared": 5, "flat": 5}
    assert second.metrics["replacements"] == 2
    assert "advantage" in second.alarms[0].text
