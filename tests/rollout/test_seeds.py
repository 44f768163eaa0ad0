"""The dataset of seeds."""

from __future__ import annotations

import pytest

from etude.rollout.datasets import SeedsConfig


def ids(**fields) -> list[str]:
    return [example.id for example in SeedsConfig(**fields).examples()]


def test_more_examples_begin_with_the_same_ones():
    assert ids(size=50)[:10] == ids(size=10)
    assert len(set(ids(size=1000))) == 1000
    assert ids(size=10) != ids(size=10, seed=1)


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_no_split_has_an_example_of_the_other(seed: int):
    assert not {*ids(size=2000)} & {*ids(size=2000, seed=seed, split="validation")}


def test_an_example_is_its_seed_and_what_goes_with_it():
    (example,) = SeedsConfig(size=1, inputs={"level": 3}).examples()
    assert example.id == f"seed-{example.inputs['seed']}"
    assert example.inputs["level"] == 3 and 0 <= example.inputs["seed"] < 2**31
