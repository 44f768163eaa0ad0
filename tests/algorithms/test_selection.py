from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from etude.core.episode import Example
from etude.rewards.collections import examples_for_epoch


def dataset(size):
    return [Example(str(number)) for number in range(size)]


def chosen(size, count, epoch, seed=0):
    return [example.id for example in examples_for_epoch(dataset(size), count, epoch, seed)]


def test_all_examples_in_their_order_when_no_count_is_given_or_it_covers_them():
    assert chosen(3, None, 5) == ["0", "1", "2"]
    assert chosen(3, 3, 5) == ["0", "1", "2"]
    assert chosen(3, 9, 5) == ["0", "1", "2"]


@given(st.integers(2, 12), st.integers(1, 12), st.integers(0, 20), st.integers(0, 5))
def test_epochs_have_no_example_twice_and_passes_use_all_examples_equally_often(size, count, epochs, seed):
    used: Counter[str] = Counter({str(number): 0 for number in range(size)})
    for epoch in range(epochs):
        ids = chosen(size, count, epoch, seed)
        assert len(ids) == len(set(ids)) == min(count, size)
        used.update(ids)
    assert max(used.values()) - min(used.values()) <= 1
