"""RLOO by hand, and its gradient against TRL's."""

from __future__ import annotations

import warnings

import pytest
import torch

from etude.algorithms.grpo import Rloo
from etude.core.sample import Sample
from tests.algorithms.test_grpo import sample
from tests.learner.gradients import assert_same, batch_of, gradient_by_autograd, gradient_of, sequences
from tests.models.tiny_models import fresh_policy, true_logprobs

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], [-1.0, 1.0]),
        ([1.0, 2.0, 6.0], [-3.0, -1.5, 4.5]),
        ([0.5, 0.5, 0.5], [0.0, 0.0, 0.0]),
        ([2.0], [0.0]),
    ],
)
def test_an_advantage_is_the_distance_to_the_mean_of_the_others(rewards, expected):
    assert Rloo().compare(rewards) == pytest.approx(expected)
    others = [
        reward - (sum(rewards) - reward) / (len(rewards) - 1) if len(rewards) > 1 else 0.0
        for reward in rewards
    ]
    assert Rloo().compare(rewards) == pytest.approx(others)


def test_branches_of_one_episode_count_once():
    group = [sample(1.0, 1, episode="e"), sample(1.0, 1, episode="e"), sample(0.0, 1, episode="f")]
    assert Rloo().advantages(group) == [[1.0], [1.0], [-1.0]]


def test_it_takes_the_options_of_grpo():
    algorithm = Rloo(overlong_limit=2, group=4, credit="agent", correction="truncate")
    assert (algorithm.type_name, algorithm.num_generations, algorithm.beta) == ("rloo", 4, 0.0)
    assert algorithm.gradient()["aggregation"] == "constant"


def test_on_policy_its_gradient_is_that_of_trl(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl = pytest.importorskip("trl")
        datasets = pytest.importorskip("datasets")
    of = fresh_policy()
    units = []
    for one in sequences(of, 6):
        length = len(one.ids) - 1
        logprobs = (0.0, *true_logprobs(of, one.ids[:1], one.ids[1:]))
        advantages = (0.0,) + (max(one.advantages, key=abs),) * length
        units.append(Sample(one.ids, (False,) + (True,) * length, logprobs, advantages))
    config = trl.RLOOConfig(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=8, beta=0.0,
        disable_tqdm=True, bf16=False, num_generations=8, max_completion_length=9,
    )  # fmt: skip
    trainer = trl.RLOOTrainer(
        model=of.model,
        args=config,
        train_dataset=datasets.Dataset.from_dict({"prompt": ["a"] * 8}),
        processing_class=of.tokenizer,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
    )
    of.model.eval()
    width = max(len(one.ids) for one in units)

    def padded(rows, padding=0):
        return torch.tensor([[*row, *[padding] * (width - len(row))] for row in rows])

    ids, real = padded([one.ids for one in units]), padded([[1] * len(one.ids) for one in units])
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": real[:, :1],
        "completion_ids": ids[:, 1:],
        "completion_mask": real[:, 1:],
        "advantages": torch.tensor([one.advantages[-1] for one in units]),
        "old_logps": torch.tensor([sum(one.logprobs) for one in units]),
    }
    _, theirs = gradient_by_autograd(of, trainer._compute_loss(of.model, inputs))
    # Of the loss only the gradient is the same: a ratio for the sequence, and one for each of its tokens.
    _, ours = gradient_of(of, batch_of(units), Rloo(correction="none"))
    assert_same((0.0, ours), (0.0, theirs))
